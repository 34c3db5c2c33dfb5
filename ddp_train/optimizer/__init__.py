"""Optimizers: which parameters get which rate and decay, and Muon. All other optimizers are torch's own or others', named by `_target_`."""

from ddp_train.optimizer.muon_adamw import MuonAdamW, muon

__all__ = ["MuonAdamW", "muon"]
