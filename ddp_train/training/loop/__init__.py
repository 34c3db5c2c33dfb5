"""The run's loop: begin to read at `trainer`; `train_step` is one step. Evaluation, callbacks, and features of a step or after it.

The loop writes no files but predictions: saving and records are callables that it gets, and of the run folder it knows paths.
"""
