"""Those who start the node programs on machines: each engine's own tools (`sbatch`, `scontrol`, `ssh`), behind five methods. No torch.

engine            the protocol, what it gives and takes, and which engines there are
slurm             SLURM: its scripts (slurm_script), its commands (slurm_client), and a run inside salloc
ssh               OpenSSH: a client that holds a line to each machine (ssh_client), and the far end of it (ssh_remote)
"""
