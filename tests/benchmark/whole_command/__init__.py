"""Whole commands, measured from outside: `ddp-train` against a script of torch alone, Fabric, Lightning and Accelerate.

    make benchmark ARGS="--workloads W1 --tiers user --processes 2 --pairs 8"

    __main__    the command line: which rows, in which order           ways       the command of each way
    run         one command, started and watched                       figures    from times to the numbers of a row, and the table
    restart     a rank is killed, ours against another checkout's      scripts/   the models with their probe, and the peers' scripts

What is measured comes from a probe in the model (scripts/workloads.py), which is none of ours and the same for every way, from the
process table, and from the clock of the one who waits at the prompt.
"""
