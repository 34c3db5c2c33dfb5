"""Storage of checkpoints: plain dicts are written, and plain dicts are read. Of a run only the names of its parts are known (`layout`).

    step_00001000/  rank_00000.safetensors ...  manifest.json (bytes and hash of each file)  COMPLETE (hash of the manifest)

A rank's file holds its share of the shared state, and the state of that rank alone, as tensors and JSON: nothing can be executed.

    codec          state <-> plain JSON and named tensors       layout         which rank writes which bytes
    tensor_file    the file of a rank                           staging        a copy of a rank's share in memory
    manifest       the files, and what it says of them          catalog        which checkpoints are there, and the best
    save           what a rank calls, and the threads of all    schedule       after which steps, and which ones stay
    read           the newest good one, and the saved state     foreign_files  weights of other programs; foreign_form: without torch

`ddp_train/training/state/saved_state.py` chooses what a run saves.
"""
