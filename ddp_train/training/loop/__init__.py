"""The run's loop: begin to read at `trainer`; `train_step` is one step. Evaluation, callbacks, and features of a step or after it.

The loop writes no files but predictions: `Checkpoints` saves and `Records` records what it gives them (`RunServices`).
"""
