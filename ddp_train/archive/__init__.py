"""What runs have left, read from their folders alone: an index of many, comparison of a few, and cleaning up. Imports no torch.

Read by `cli`, and by programs and notebooks (`ddp_train.runs`); a run that trains never imports it.
"""
