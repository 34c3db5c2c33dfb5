"""Storage: what goes in are plain dicts, what comes out are plain dicts. No module here knows a model.

    step_00001000/  rank_00000.safetensors ...  manifest.json (bytes and hash of each file)  COMPLETE (hash of the manifest)

A rank's file holds its share of what all ranks have and what is its own, as tensors and JSON: nothing in a checkpoint can be executed.

    codec          state <-> plain JSON and named tensors       staging        which rank writes which bytes, and their copy in memory
    tensor_file    the files                                    schedule       after which steps, which ones stay, is there room
    save           what a rank calls, and the threads of all    verify         is it what was written? the newest good one
    read           what it holds, each rank a part of the files catalog        which checkpoints are there, and the best
    foreign_files  weights of files that anybody wrote          foreign_form   the same files told by their form, no torch

What a run saves is said in `ddp_train/training/state/saved_state.py`.
"""
