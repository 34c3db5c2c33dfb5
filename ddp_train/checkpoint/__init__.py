"""Checkpoints: a folder per step, complete and verified or not there at all.

    step_00001000/  rank_00000.safetensors ...  manifest.json (bytes and hash of each file)  COMPLETE (hash of the manifest)

A rank's file holds its share of what all ranks have (model, optimizer, scheduler, scaler, position) and what is its own (random streams,
window sums, state of the data), as tensors and JSON: nothing in a checkpoint can be executed. The modules, from the bottom:

    codec        state <-> plain JSON and named tensors        share        which rank writes which bytes
    tensor_file  the files                                     snapshot     a copy in memory, laid out as the file will be
    verify       is it what was written?                       folder       which checkpoints are there
    publish      manifest, mark, rename                        together     one save in the threads of all ranks
    parts        what of a run is saved                        save, load   what the worker calls
    compare      does it fit this run?                         retention    which old ones go
    board        messages between the threads of one save      limit        can so many tensors be named at all?
    limit        is it too much for the files' headers?        host_memory  what a GPU can copy to

A writer of another kind (torch.distributed.checkpoint for sharded models) would put its files into the same folder, between `make_partial`
and `publish`.
"""

from ddp_train.checkpoint.folder import newest_good, remove_debris, set_aside_after
from ddp_train.checkpoint.read import load, read_shared
from ddp_train.checkpoint.retention import remove_old
from ddp_train.checkpoint.save import Saver
from ddp_train.checkpoint.verify import CheckpointError, read_manifest, verify
from ddp_train.training.saved_state import hashes
from ddp_train.training.tensor_limit import require_few_tensors

__all__ = [
    "CheckpointError",
    "Saver",
    "hashes",
    "load",
    "newest_good",
    "read_manifest",
    "read_shared",
    "remove_debris",
    "remove_old",
    "require_few_tensors",
    "set_aside_after",
    "verify",
]
