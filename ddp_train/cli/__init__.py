"""The typed command: `main` knows the commands, `compose` trains, the others are named after what they do. Imports no torch."""
