"""The watch on hangs: a process on each node that watches its ranks, and the heartbeats of a rank. Imports no torch."""
