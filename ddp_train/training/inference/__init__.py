"""Use the saved weights of a run: `load`, predictions, exports."""
