"""ddp_train: compose once with Hydra, train anywhere with torchrun."""

__version__ = "0.1.0"
