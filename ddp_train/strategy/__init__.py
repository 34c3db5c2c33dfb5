"""Strategies: how the ranks hold the model together."""
