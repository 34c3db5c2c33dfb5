"""From a config to trained weights, on one rank. `trainer` is where to begin reading.

    trainer         the loop: the order of things in a run      evaluation      one evaluation, exact on any number of ranks
    build           components in the order they need           instantiate     one `_target_` node
    build_data      its data sets, samplers and loaders         turn            parts of an objective that train in turn
    components      what a run is made of                       state           how far it is
    seeding         random streams                              initial_weights weights to begin with
    record/         what a run records: losses, rates, events   check/          what is tried before the first step, memory
    profile/        windows of steps that are recorded          skip_nonfinite  steps that are left out
    replica_check   ranks whose weights differ
    checkpoints     when one is due, and the way back           restore         continuing when a run begins
    saved_state     what a checkpoint holds                     compare_state   whether it fits
    device_queue    how far the host runs ahead                 callbacks       their events, and what they see of the run
    metric          metrics by `_target_`, put together over the ranks

The loop asks and tells plain callables; `ddp_train/rank/run_job.py` puts it all together.
"""
