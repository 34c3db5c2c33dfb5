"""ddp_train: compose once with Hydra, train anywhere with torchrun."""

from pathlib import Path

__version__ = "0.1.0"

FOLDER = Path(__file__).parent
"""Where the package lies."""
