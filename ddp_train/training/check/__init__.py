"""Trials before the first step, which leave nothing behind: one batch of each kind, the memory of a step, the largest micro-batch."""
