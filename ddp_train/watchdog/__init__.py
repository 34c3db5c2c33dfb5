"""The watch on hangs: a process on each machine that watches its ranks, and the heartbeats of a rank. Imports no torch."""
