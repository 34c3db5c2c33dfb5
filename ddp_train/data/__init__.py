"""Data sources: one class per kind of data, one instance per split, a whole batch per read."""
