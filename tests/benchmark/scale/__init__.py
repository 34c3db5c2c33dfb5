"""What thousands of ranks cost, simulated in one process: `python -m tests.benchmark.scale`."""
