"""The run's folder: its paths, who may write in it, and what a run leaves there. Imports no torch."""
