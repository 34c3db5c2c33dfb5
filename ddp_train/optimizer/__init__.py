"""Optimizers: which parameters get which rate and decay, and Muon. All others are named by `_target_`."""

from ddp_train.optimizer.muon_adamw import MuonAdamW, muon
from ddp_train.optimizer.parts import Several, several

__all__ = ["MuonAdamW", "Several", "muon", "several"]
