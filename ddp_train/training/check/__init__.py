"""What is tried and measured before the first step, and undone: one batch of each kind, the memory of a step, the largest micro-batch."""
