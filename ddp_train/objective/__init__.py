"""Objectives: what is minimised and what is measured. Losses are sums over units, so that the loop can form exact means over any split."""
