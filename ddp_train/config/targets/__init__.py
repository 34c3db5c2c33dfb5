"""Checks of components' configs: the class, its arguments, and the configs of the evaluation data. Imports no torch."""
