"""Rules across keys and sections, and names that nothing reads: each yields the problems that it finds. Imports no torch."""
