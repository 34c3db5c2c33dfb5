"""Where numbers go: console, JSON lines, TensorBoard. On global rank 0 only."""
