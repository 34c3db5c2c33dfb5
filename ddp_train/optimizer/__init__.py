"""Optimizers: which parameters get which rate and decay, Muon, and SGD by numbers of its own. All others are named by `_target_`."""

from ddp_train.optimizer.decoupled import decoupled_sgd
from ddp_train.optimizer.muon_adamw import MuonAdamW, muon
from ddp_train.optimizer.parts import Several, several

__all__ = ["MuonAdamW", "Several", "decoupled_sgd", "muon", "several"]
