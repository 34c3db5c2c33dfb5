"""Many jobs: composed by a sweeper, run in slots, kept in one folder. Imports no torch."""
