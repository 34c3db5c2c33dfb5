"""Those who start the node programs on machines: each engine's own tools (`sbatch`, `scontrol`, `ssh`), behind five methods. No torch."""
