"""What a run records: losses between two log steps, the numbers of a record, where records and events go, per-sample predictions.

Between two log steps nothing here waits for the device.
"""
