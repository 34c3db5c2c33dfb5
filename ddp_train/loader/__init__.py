"""Samples to micro-batches: which sample comes when, who reads it, how it gets to the device. Never imports a data set."""
