"""A configuration: checked, typed, compared. Every problem is found here, before a process starts. Imports no torch."""
