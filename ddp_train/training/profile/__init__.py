"""Windows of steps that are recorded for docs/profiling.md. A run without one has a single attribute to look at each step."""
