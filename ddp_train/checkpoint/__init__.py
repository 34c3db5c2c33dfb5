"""Checkpoints: a folder per step, complete and verified or not there at all.

    step_00001000/  shared.pt (model, optimizer, scheduler, scaler, position)  rank_00000.pt ... (random streams, state of the data)
                   manifest.json  COMPLETE

Everything is written into a folder beside it, synchronised to disk, and renamed. Nothing but tensors and plain containers is saved,
so that reading executes nothing (`weights_only=True`).
"""

from ddp_train.checkpoint.folder import newest_good, set_aside_after, verify
from ddp_train.checkpoint.load import load
from ddp_train.checkpoint.save import save

__all__ = ["load", "newest_good", "save", "set_aside_after", "verify"]
