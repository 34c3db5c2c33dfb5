"""Rules across keys and sections: each yields the problems that it finds. Imports no torch."""
