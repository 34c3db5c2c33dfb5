"""Who is blamed for a hang, by what is known of the ranks of one node."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta
from traceback import FrameSummary

from ddp_train import hang, stacks
from ddp_train.beat import Beat, Beats, Heart
from ddp_train.process import exit_code_of, state_of
from ddp_train.pulse import Phase, Pulse
from ddp_train.watch import patience

WAITS = [FrameSummary("/home/me/train.py", 3, "step"), FrameSummary("/venv/torch/distributed/distributed_c10d.py", 9, "all_reduce")]
BACKWARD = [FrameSummary("/home/me/train.py", 4, "step"), FrameSummary("/venv/torch/autograd/graph.py", 9, "_engine_run_backward")]
SAVES = [FrameSummary("/site-packages/ddp_train/checkpoint/save.py", 7, "finish")]
WAITS_FOR_SAVES = [*SAVES, FrameSummary("/site-packages/ddp_train/checkpoint/board.py", 9, "wait_for")]
OWN = [FrameSummary("/home/me/model.py", 7, "forward")]


def facts(
    rank: int, frames: list[FrameSummary], *, state: str = "S", step: int = 5, phase: Phase = Phase.STEP, **others: object
) -> hang.Facts:
    beat = Beat(time=float(rank), phase=phase, step=step, first_step=0)
    return hang.Facts(rank=rank, pid=100 + rank, state=state, beat=beat, still_s=4.0, frames=frames, **others)  # type: ignore[arg-type]


def guilty(*ranks: hang.Facts, overdue: list[int] | None = None) -> list[int]:
    overdue = [each.rank for each in ranks] if overdue is None else overdue
    return [each.facts.rank for each in hang.blame(ranks, overdue)]


def test_a_rank_in_a_collective_is_innocent() -> None:
    assert guilty(facts(0, WAITS), facts(1, OWN), facts(2, BACKWARD)) == [1]
    assert guilty(facts(0, WAITS), facts(1, WAITS), facts(2, BACKWARD)) == []
    assert guilty(facts(0, WAITS_FOR_SAVES), facts(1, SAVES), facts(2, WAITS_FOR_SAVES)) == [1]


def test_what_the_kernel_knows_comes_before_stacks() -> None:
    assert guilty(facts(0, OWN), facts(1, [], state="T"), facts(2, OWN)) == [1]
    assert guilty(facts(0, WAITS), facts(1, WAITS, state="D"), facts(2, BACKWARD)) == [1]


def test_who_runs_ahead_on_a_gpu_and_waits_for_it_is_innocent() -> None:
    ahead = {"step": 7, "uses_device": True}
    assert guilty(facts(0, OWN, **ahead), facts(1, OWN, step=5, uses_device=True), facts(2, OWN, **ahead)) == [1]


def test_only_ranks_whose_time_is_over_are_blamed() -> None:
    assert guilty(facts(0, WAITS, phase=Phase.EVALUATION), facts(1, OWN, phase=Phase.EVALUATION), overdue=[0]) == []


def test_a_stuck_loader_worker_is_blamed_with_what_it_reads() -> None:
    worker = hang.Worker(pid=7, state="T", reads="samples 3 to 5")
    (found,) = hang.blame([facts(0, WAITS), facts(1, OWN, phase=Phase.DATA, workers=[worker])], [0, 1])
    assert found.facts.rank == 1
    assert found.why == "waits for its loader worker (pid 7), which is stopped while it reads samples 3 to 5"
    assert "phase data" in hang.to_failure([found], [found.facts], key="cluster.step_timeout_s", limit_s=3).message


def test_where_all_wait_the_one_in_another_place_is_named() -> None:
    assert hang.blame_anybody([facts(0, WAITS), facts(1, BACKWARD), facts(2, WAITS)]).facts.rank == 1


def test_beats_and_stacks_are_read_from_another_process() -> None:
    code = """
import time
from ddp_train import stacks
from ddp_train.beat import Heart
from ddp_train.pulse import Phase, Pulse
heart, pulse = Heart(), Pulse()
stacks.answer()
stacks.Note().write("the samples 3 to 5")
heart.follow(pulse)
pulse.enter(Phase.DATA, 4)
pulse.enter(Phase.SAVE, 5)
def linger():
    print("ready", flush=True) or time.sleep(60)
linger()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        beat = Beats(process.pid).last(since=0.0)
        assert (beat.phase, beat.step, beat.first_step, beat.has_taken_a_step) == (Phase.SAVE, 5, 4, True)
        assert Beats(process.pid).last(since=time.monotonic()).phase is Phase.START  # of a job before
        frames = stacks.main_thread(stacks.ask([process.pid])[process.pid])
        assert [frame.name for frame in frames] == ["<module>", "linger"]
        assert stacks.note_of(process.pid) == "the samples 3 to 5"
        process.send_signal(signal.SIGKILL)
        while state_of(process.pid) != "Z":
            time.sleep(0.01)
        assert exit_code_of(process.pid) == -9
    assert state_of(process.pid) == ""


def test_a_process_that_has_not_registered_is_not_asked() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert stacks.ask([process.pid], within_s=0.1) == {}
        assert process.poll() is None  # the signal would have ended it
        process.kill()


def test_a_beat_costs_little() -> None:
    heart, pulse = Heart(), Pulse()
    heart.follow(pulse)
    started = time.perf_counter()
    for step in range(10_000):
        pulse.enter(Phase.STEP, step)
    assert (time.perf_counter() - started) / 10_000 < 50e-6  # it takes 1 us; the limit is for a busy machine


def test_collectives_are_more_patient_than_the_watch() -> None:
    assert patience({"start_timeout_s": 1800, "step_timeout_s": 300}) > timedelta(seconds=2 * 1800)
    assert patience({"start_timeout_s": None, "step_timeout_s": 300}) >= timedelta(days=1)
