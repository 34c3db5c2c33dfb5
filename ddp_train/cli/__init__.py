"""The typed command. Imports no torch."""
