"""What a run is good for when it has saved weights: `load`, predictions, exports."""
