"""A run's configuration: checking, typing and comparing it. Every problem is found before a process starts. Imports no torch."""
