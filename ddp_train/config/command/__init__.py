"""What was typed: its words and options, the files that it composes, and what is wrong with what Hydra refused. Imports no torch."""
