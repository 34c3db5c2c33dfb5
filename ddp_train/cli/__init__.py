"""The typed command: `main` knows the commands, `compose` trains, the other files have the names of commands. Imports no torch."""
