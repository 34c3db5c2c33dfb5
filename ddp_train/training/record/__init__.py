"""What a run records: losses between two log steps, the numbers of a record, where records and events go, per-sample predictions.

Everything here works on what the loop hands over. Between two log steps nothing waits for the device.
"""
