"""The processes that a torchrun agent started, one per rank: what each of them runs.

They are the ranks of a job that our agent was given. Where it was given none, as a user's torchrun, the command line says it
(`command_group`): for a sweep they are `Member`s, and the jobs run in processes forked from them.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_train.distributed.store import LEAVE_WITHIN_S, JoinedAttempt, agree_on_attempt, join_store, leave
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FINAL, UserError
from ddp_train.launch import restart_note
from ddp_train.launch.job import Job
from ddp_train.rank.rank import run_job
from ddp_train.rank.restart import archive_earlier_failure, final_code_before
from ddp_train.system import process_env

if TYPE_CHECKING:
    from ddp_train.launch.job_runner import CommandLine

_LEAVES_PROGRAM_WITHIN_S = 3.0  # another program than training: some ranks may be stuck, and it has said what it had to say


def main(load_cli: Callable[[], "CommandLine"], words: Sequence[str]) -> int:
    """Run the one job that `ddp-train` composed, or else what the command line asks for. Every rank runs this.

    `load_cli` imports `cli.main`, which runs the command line (`words`) where rank 0 finds no job in its environment.
    """
    # DDP says this of every convolution with one input channel, whose strides are ambiguous; nothing is slower for it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) must not drown the failure's screen
    if process_env.PLACE in os.environ:
        from ddp_train.rank.sweep_member import run_for_member

        run_for_member()
        return DONE
    job = Job.from_json(Path(os.environ[process_env.JOB]).read_text("utf-8")) if process_env.JOB in os.environ else None
    try:
        attempt = _meet_ranks(job)
    except UserError as error:
        print(error, file=sys.stderr)
        return ENVIRONMENT_REFUSES
    if job is not None:
        job = job if attempt.continues_from is None else job.resumed_from(attempt.continues_from)
        ending = run_job(job, attempt)
    else:
        from ddp_train.rank import command_group

        group = command_group.CommandGroup(attempt, words)
        ending, job = group.run(load_cli), group.job
    if ending.was_stopped:  # the agent may start the ranks again, in another number, and some may be gone
        return DONE  # it has not failed: torchrun must neither restart it nor put its page about failures over our last line
    within_s = _LEAVES_PROGRAM_WITHIN_S if job is not None and not job.is_resumable else LEAVE_WITHIN_S
    leave(attempt.store, attempt.rank, attempt.size, within_s=within_s)
    if ending.exit_code not in FINAL:  # else a user's torchrun starts all again, and is told the same at once
        restart_note.forget_run()
    return ending.exit_code


def _meet_ranks(job: Job | None) -> JoinedAttempt:
    """Meet the other ranks, and make way for what this attempt writes. Collective. Raises UserError: a rank did not come."""
    note = restart_note.recall_run()
    rank, size = process_env.rank(), process_env.world_size()
    if note is not None and rank == 0 and job is not None and final_code_before(note.continues_from) is None:  # before any rank can fail
        archive_earlier_failure(note.continues_from, size)
    return agree_on_attempt(join_store(), rank, size, continues_from=None if note is None else note.continues_from)
