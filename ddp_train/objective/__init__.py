"""Objectives: the loss and the metrics. Each returns values for each sample, of which the loop forms exact means over any split."""
