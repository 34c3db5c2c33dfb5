"""What a run is made of, once it is built. Made by `build`, used by every room above."""
