"""Storage: what goes in are plain dicts, what comes out are plain dicts. No module here knows a model.

    step_00001000/  rank_00000.safetensors ...  manifest.json (bytes and hash of each file)  COMPLETE (hash of the manifest)

A rank's file holds its share of what all ranks have and what is its own, as tensors and JSON: nothing in a checkpoint can be executed.

    codec          state <-> plain JSON and named tensors       partition      which rank writes which bytes
    tensor_file    the files                                    snapshot       a copy in memory, laid out as the file will be
    save           what a rank calls, and its thread            joint_save     one save in the threads of all ranks
    mailbox        what these threads tell each other           publish        manifest, mark, rename
    verify         is it what was written?                      read           what it holds, each rank a part of the files
    folder         which checkpoints are there                  catalog        the same without torch; which is the best
    schedule       after which steps, and which ones stay       disk_space     is there room for one?
    foreign_files  weights of files that anybody wrote          foreign_form   the same files told by their form, no torch
    dcp            weights in folders of torch.distributed.checkpoint

What a run saves is said in `ddp_train/training/state/saved_state.py`.
"""
