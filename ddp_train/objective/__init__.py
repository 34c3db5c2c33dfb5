"""Objectives: the loss and the metrics. Losses are sums over units, so that the loop can form exact means over any split."""
