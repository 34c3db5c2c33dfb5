"""The run's loop: begin to read at `trainer`; `train_step` is one step. Evaluation, callbacks, and features of a step or after it.

The loop knows no files: saving and writing are callables that it gets.
"""
