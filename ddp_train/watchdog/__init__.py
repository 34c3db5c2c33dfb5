"""Who stands still: a process on each node that looks at its ranks, and what a rank tells it. Imports no torch."""
