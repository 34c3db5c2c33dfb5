"""The run's loop: `trainer` is where to begin reading, `train_step` is one step.

Evaluation, callbacks, and what is chosen for a step or after it. The loop knows no files: saving and writing are callables that it gets.
"""
