"""Checks of `_target_` nodes: the class, its arguments, and the nodes of the evaluation data. Imports no torch."""
