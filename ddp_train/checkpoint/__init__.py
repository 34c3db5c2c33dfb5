"""Storage of checkpoints: plain dicts are written, and plain dicts are read. Of a run only the names of its parts are known (`layout`).

    step_00001000/  rank_00000.safetensors ...  manifest.json (bytes and hash of each file)  COMPLETE (hash of the manifest)

A rank's file holds its share of the shared state, and the state of that rank alone, as tensors and JSON: nothing can be executed.

    codec          state <-> plain JSON and named tensors       layout         which rank writes which bytes
    tensor_file    the file of a rank                           staging        a copy of a rank's share in memory
    manifest       the files, and what it says of them          verify         is a checkpoint undamaged? the newest good one
    save           what a rank calls, and the threads of all    catalog        which checkpoints are there, and the best
    read           the saved state; each rank reads some files  schedule       after which steps, which ones stay, is there room
    foreign_files  weights of files of other programs           foreign_form   checks the form of such a file, without torch

`ddp_train/training/state/saved_state.py` chooses what a run saves.
"""
