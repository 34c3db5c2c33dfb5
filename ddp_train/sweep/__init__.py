"""Many jobs: composed by a sweeper, run in slots, kept in one folder. Runs in the launcher; imports no torch."""
