"""From a config to trained weights, on one rank. `loop/trainer.py` is where to begin reading. Rooms, the upper ones use the lower ones:

    inference/      what a finished run gives: `load`, predictions, exports
    build/          components in the order that they need, and what features add to the loop (`trainer.py`)
    profile         steps that are recorded by torch's profiler
    loop/           the order of things in a run, one step, one evaluation, callbacks
    state/          checkpoints, weights to begin with, the identity of the data
    check/          what is tried before the first step, and memory
    parts/          what a run is made of
    record/         what a run records: losses, rates, events
    instantiate     one component              seeding     random streams         train_state     how far a run is

The loop itself writes no files but predictions, and knows no config and no signals: `ddp_train/rank/train_job.py` puts it all together.
"""
