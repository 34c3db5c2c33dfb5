"""From a config to trained weights: building, the loop, and what watches over its numbers."""
