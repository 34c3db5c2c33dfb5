"""Imported by the server that loader workers are forked from, before all else: it ends with its rank, also while it imports torch."""

from ddp_train.process import die_with_parent

die_with_parent()
