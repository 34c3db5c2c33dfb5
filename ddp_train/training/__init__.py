"""From a config to trained weights, on one rank. `trainer` is where to begin reading.

    trainer         the loop: the order of things in a run      evaluation      one evaluation, exact on any number of ranks
    build           components in the order they need           instantiate     one `_target_` node
    build_data      its data sets, samplers and loaders         turn            parts of an objective that train in turn
    components      what a run is made of                       state           how far it is
    seeding         random streams                              initial_weights weights to begin with
    log_window      the steps since the last record             records         where records and events go
    loss_monitor    losses that are lost or stand out           skip_nonfinite  steps that are left out
    replica_check   ranks whose weights differ                  sanity_check    what is tried before the first step
    checkpoints     when one is due, and the way back           restore         continuing when a run begins
    saved_state     what a checkpoint holds                     compare_state   whether it fits
    state_size      how large it will be                        predictions     per-sample outputs of an evaluation
    device_queue    how far the host runs ahead                 callbacks       their events, and what they see of the run
    logged          what they and the model log                 metric          metrics by `_target_`, put together over the ranks
    throughput      rates, memory and MFU in the record         model_flops     the operations of a step
    device_peak     what a device can do at best                profiler        windows of steps that are recorded (profile_*)

The loop asks and tells plain callables; `ddp_train/rank/run_job.py` puts it all together.
"""
