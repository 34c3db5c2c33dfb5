"""Who is blamed for a hang, by what is known of the ranks of one node."""

from __future__ import annotations

from dataclasses import replace
from traceback import FrameSummary

import pytest

from ddp_train import FOLDER
from ddp_train.system.phase import Phase
from ddp_train.watchdog import diagnosis
from ddp_train.watchdog.client import Heartbeat
from ddp_train.watchdog.diagnosis import LoaderWorker, RankView, find_any_culprit, find_culprits, to_failure

WAITS = [FrameSummary("/home/me/train.py", 3, "step"), FrameSummary("/venv/torch/distributed/distributed_c10d.py", 9, "all_reduce")]
BACKWARD = [FrameSummary("/home/me/train.py", 4, "step"), FrameSummary("/venv/torch/autograd/graph.py", 9, "_engine_run_backward")]
SAVES = [FrameSummary("/site-packages/ddp_train/checkpoint/save.py", 7, "finish")]
WAITS_FOR_SAVES = [*SAVES, FrameSummary("/site-packages/ddp_train/distributed/store.py", 30, "wait_for_thread")]
OWN = [FrameSummary("/home/me/model.py", 7, "forward")]


def view(
    rank: int, frames: list[FrameSummary], *, state: str = "S", step: int = 5, phase: Phase = Phase.STEP, **others: object
) -> RankView:
    heartbeat = Heartbeat(time=float(rank), phase=phase, step=step, has_taken_a_step=True)
    return RankView(rank=rank, pid=100 + rank, state=state, heartbeat=heartbeat, still_s=4.0, frames=frames, **others)  # type: ignore[arg-type]


def guilty(*ranks: RankView, overdue: list[int] | None = None) -> list[int]:
    overdue = [each.rank for each in ranks] if overdue is None else overdue
    return [each.view.rank for each in find_culprits(ranks, overdue)]


def test_the_files_of_ours_by_which_a_rank_is_judged_are_there() -> None:
    paths = (*diagnosis._WAITS, *diagnosis._READS, *diagnosis._READS_NOTHING)
    ours = [path for path in paths if path.startswith("ddp_train/")]
    assert len(ours) > 4
    assert [path for path in ours if not (FOLDER.parent / path).exists()] == []


def test_a_rank_in_a_collective_is_innocent() -> None:
    assert guilty(view(0, WAITS), view(1, OWN), view(2, BACKWARD)) == [1]
    assert guilty(view(0, WAITS), view(1, WAITS), view(2, BACKWARD)) == []
    assert guilty(view(0, WAITS_FOR_SAVES), view(1, SAVES), view(2, WAITS_FOR_SAVES)) == [1]


def test_what_the_kernel_knows_comes_before_stacks() -> None:
    assert guilty(view(0, OWN), view(1, [], state="T"), view(2, OWN)) == [1]
    assert guilty(view(0, WAITS), view(1, WAITS, state="D"), view(2, BACKWARD)) == [1]


def test_who_runs_ahead_on_a_gpu_and_waits_for_it_is_innocent() -> None:
    ahead = {"step": 7, "uses_device": True}
    assert guilty(view(0, OWN, **ahead), view(1, OWN, step=5, uses_device=True), view(2, OWN, **ahead)) == [1]


GPT = [FrameSummary("/home/me/train.py", 4, "step"), FrameSummary("/home/me/gpt.py", 88, "forward")]
DEEPER = [FrameSummary("/home/me/train.py", 4, "step"), FrameSummary("/venv/torch/nn/modules/linear.py", 125, "forward")]
READ = [
    FrameSummary("/site-packages/ddp_train/training/loop/trainer.py", 300, "_log"),
    FrameSummary("/site-packages/ddp_train/training/record/log_window.py", 70, "sums"),
]
BOUND = [
    FrameSummary("/site-packages/ddp_train/training/build/trainer.py", 45, "after_step"),
    FrameSummary("/venv/torch/cuda/streams.py", 9, "wait"),
]
MUON = [
    FrameSummary("/site-packages/ddp_train/training/loop/train_step.py", 185, "_descend"),
    FrameSummary("/home/me/muon.py", 60, "orthogonalize"),
]
COPIES_STATE = [FrameSummary("/site-packages/ddp_train/checkpoint/staging.py", 91, "copy_state")]
SCORE = [
    FrameSummary("/site-packages/ddp_train/training/loop/trainer.py", 235, "evaluate"),
    FrameSummary("/home/me/objective.py", 12, "score"),
]
DATA_SET = [FrameSummary("/site-packages/ddp_train/loader/reader.py", 50, "read"), FrameSummary("/home/me/data.py", 20, "__getitem__")]


def native(
    rank: int, frames: list[FrameSummary], *, step: int = 5, phase: Phase = Phase.STEP, finished: int = 4, ends: bool = True
) -> RankView:
    """Return what is known of a rank on a GPU whose main thread is inside native code: a launch, a read, a library of the user's.

    Args:
        finished: steps that its device has finished, as last seen.
        ends: False: while the host waits for its device to finish one more, so that the number is exact.
    """
    heartbeat = Heartbeat(time=float(rank), phase=phase, step=step, has_taken_a_step=True, device_step=finished, waits_for_device=not ends)
    return RankView(
        rank=rank, pid=100 + rank, state="R", heartbeat=heartbeat, still_s=4.0, frames=frames, uses_device=True, is_in_native_code=True
    )


def bound(rank: int, *, step: int = 12, finished: int = 4) -> RankView:
    """Return a rank whose host is as far ahead of its device as it may be."""
    return native(rank, BOUND, step=step, finished=finished, ends=False)


def python(rank: int, frames: list[FrameSummary], **others: object) -> RankView:
    """Return what is known of a rank on a GPU whose main thread runs Python, or waits where Python waits."""
    return view(rank, frames, uses_device=True, **others)  # type: ignore[arg-type]


GPUS = {
    "rank 5 in its data, the others in launches, reads and at the bound: it alone is not at its device": (
        [
            native(0, READ),
            *(native(rank, GPT, step=7) for rank in (1, 2, 3)),
            bound(4),
            python(5, DATA_SET, phase=Phase.DATA),
            native(6, DEEPER),
            native(7, BACKWARD),
        ],
        [5],
    ),
    "on the other node: each host here has given its device all that it could": (
        [bound(0), native(1, GPT, step=6), native(2, READ), native(3, BACKWARD)],
        [],
    ),
    "all ranks deep in launches, which no host is to blame for": ([native(rank, GPT) for rank in range(4)], []),
    "a device in a kernel of its own that the others' have finished": (
        [bound(0, finished=5), bound(1, finished=4), bound(2, finished=5)],
        [1],
    ),
    "a device in a kernel before the all-reduce that the others' wait in: no host can tell which": ([bound(rank) for rank in range(3)], []),
    "a host that is steps behind, though all devices stand in the same step": ([bound(0), bound(1), native(2, GPT, step=6)], []),
    "the same, and a rank that has not even begun the step": (
        [bound(0), native(2, GPT, step=6), python(1, DATA_SET, step=4, phase=Phase.DATA)],
        [1],
    ),
    "in Python code of the objective": ([native(0, BACKWARD), python(1, SCORE), native(2, READ)], [1]),
    "in a native library of the objective: the others' devices stand in the step that its host has not given": (
        [bound(0), native(1, SCORE, step=4), bound(2)],
        [1],
    ),
    "in a backward of the user's own, in autograd's thread": ([bound(0), native(1, BACKWARD, step=4), bound(2)], [1]),
    "a loader worker": (
        [
            native(0, GPT),
            native(1, BACKWARD),
            python(2, DATA_SET, phase=Phase.DATA, workers=[LoaderWorker(pid=7, state="S", reads="samples 3 to 5")]),
        ],
        [2],
    ),
    "a worker that reads ahead, of a rank that waits for its device in an evaluation": (
        [
            replace(native(0, SCORE, phase=Phase.EVALUATION), workers=[LoaderWorker(pid=7, state="S", reads="samples 3 to 5")]),
            python(1, OWN, phase=Phase.EVALUATION),
        ],
        [1],
    ),
    "a deep GPT whose ranks stand in launches of different layers": (
        [native(0, GPT), native(1, DEEPER), native(2, [*GPT, FrameSummary("/home/me/gpt.py", 130, "attend")])],
        [],
    ),
    "Muon's step, in whose many launches all stand but one": ([native(0, MUON), native(1, MUON), python(2, OWN, phase=Phase.STEP)], [2]),
    "an evaluation on unequal shards: ranks that are through wait for the sums, one hangs in a transform": (
        [native(0, READ, phase=Phase.EVALUATION), native(1, READ, phase=Phase.EVALUATION), python(2, DATA_SET, phase=Phase.EVALUATION)],
        [2],
    ),
    "the same, in a native library of the data set, as h5py": (
        [native(0, READ, phase=Phase.EVALUATION), native(1, DATA_SET, phase=Phase.EVALUATION), native(2, READ, phase=Phase.EVALUATION)],
        [1],
    ),
    "a save that waits for the device, whose work waits for a rank that still computes": (
        [native(0, COPIES_STATE, phase=Phase.SAVE), native(1, COPIES_STATE, phase=Phase.SAVE), python(2, OWN, phase=Phase.STEP, step=4)],
        [2],
    ),
    "a save that waits for its own disk": (
        [view(0, WAITS_FOR_SAVES, phase=Phase.SAVE, uses_device=True), python(1, SAVES, phase=Phase.SAVE)],
        [1],
    ),
}
"""What hangs -> what is known of the ranks of this node, and who is to blame."""


@pytest.mark.parametrize("what", GPUS)
def test_on_gpus_hosts_that_wait_for_their_devices_are_innocent(what: str) -> None:
    ranks, expected = GPUS[what]
    assert guilty(*ranks) == expected


def test_where_all_wait_for_their_gpus_no_host_is_accused() -> None:
    found = find_any_culprit([native(0, GPT, step=7), native(1, DEEPER, step=7), native(2, BACKWARD, step=6)])
    assert found.view.rank == 2
    assert found.why == "waits for its GPU, like all ranks; no host process is the cause"
    assert "flight_recorder" in found.fix
    assert bound(0).doing() == "waits for its GPU"


def test_an_evaluation_that_others_are_still_at_is_no_hang_of_those_that_are_through() -> None:
    through, at_it = native(0, READ, phase=Phase.EVALUATION), python(1, DATA_SET, phase=Phase.EVALUATION)
    assert guilty(through, at_it, overdue=[0]) == []


def test_only_ranks_whose_time_is_over_are_blamed() -> None:
    assert guilty(view(0, WAITS, phase=Phase.EVALUATION), view(1, OWN, phase=Phase.EVALUATION), overdue=[0]) == []


def test_a_stuck_loader_worker_is_blamed_with_what_it_reads() -> None:
    worker = LoaderWorker(pid=7, state="T", reads="samples 3 to 5")
    (found,) = find_culprits([view(0, WAITS), view(1, OWN, phase=Phase.DATA, workers=[worker])], [0, 1])
    assert found.view.rank == 1
    assert found.why == "waits for its loader worker (pid 7), which is stopped while it reads samples 3 to 5"
    assert "phase data" in to_failure([found], [found.view], limit_s=3).message


def test_where_all_wait_the_one_in_another_place_is_named() -> None:
    assert find_any_culprit([view(0, WAITS), view(1, BACKWARD), view(2, WAITS)]).view.rank == 1
