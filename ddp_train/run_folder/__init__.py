"""A run's folder: its paths, the claim to it, and the files that a run writes there. Imports no torch."""
