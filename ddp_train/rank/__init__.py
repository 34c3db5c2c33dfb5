"""One process that torchrun started: it meets the others, runs a job, and says how it ended."""
