"""The records of a run: losses between two log steps, the numbers of a record, writing records and events, per-sample predictions.

Between two log steps nothing here waits for the device.
"""
