"""What only GPUs do, asked of torch without one: its deterministic kernels, its devices, and ranks by the dozen (docs/gpu.md)."""
