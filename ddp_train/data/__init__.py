"""Data sets, one class per kind of data: one instance per split, a whole batch per read. They know nothing of ranks.

`images`, `tars` and `tokens` hold what several of them share. Which sample comes when, and who reads it, is said in `ddp_train/loader`.
"""
