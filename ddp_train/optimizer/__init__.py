"""Optimizers: which parameters get which rate and decay, and Muon. All others are named by `_target_`."""

from ddp_train.optimizer.several_optimizers import MuonAdamW, Several, muon, several
