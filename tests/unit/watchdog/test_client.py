"""What a rank asks of its watchdog; beats are read from another process, and cost little."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system import stack_dump
from ddp_train.system.phase import Phase, Phases
from ddp_train.system.process import exit_code_of, state_of
from ddp_train.watchdog.__main__ import _WatchedRanks
from ddp_train.watchdog.client import FlightRecorder, HeartbeatReader, RecordRequest, WatchRequest, collective_timeout, write_heartbeats


def test_beats_and_stacks_are_read_from_another_process() -> None:
    code = """
import time
from ddp_train.system import stack_dump as stacks
from ddp_train.watchdog.client import write_heartbeats
from ddp_train.system.phase import Phase, Phases
phases = Phases()
stacks.dump_on_request()
stacks.Note().write("the samples 3 to 5")
write_heartbeats(phases)
phases.enter(Phase.DATA, 4)
phases.enter(Phase.SAVE, 5)
phases.see_device(3, is_awaited=True)
def linger():
    print("ready", flush=True) or time.sleep(60)
linger()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        heartbeat = HeartbeatReader(process.pid).last(since=0.0)
        assert (heartbeat.phase, heartbeat.step, heartbeat.has_taken_a_step) == (Phase.SAVE, 5, True)
        assert (heartbeat.device_step, heartbeat.waits_for_device) == (3, True)
        assert HeartbeatReader(process.pid).last(since=time.monotonic()).phase is Phase.START  # there is none since
        frames = stack_dump.main_thread(stack_dump.ask([process.pid])[process.pid])
        assert [frame.name for frame in frames] == ["<module>", "linger"]
        assert stack_dump.note_of(process.pid) == "the samples 3 to 5"
        assert stack_dump.in_native_code([process.pid]) == set()  # a sleep is Python's own
        process.send_signal(signal.SIGKILL)
        while state_of(process.pid) != "Z":
            time.sleep(0.01)
        assert exit_code_of(process.pid) == -9
    assert state_of(process.pid) == ""


def test_a_beat_costs_little() -> None:
    phases = Phases()
    write_heartbeats(phases)
    started = time.perf_counter()
    for step in range(10_000):
        phases.enter(Phase.STEP, step)
    assert (time.perf_counter() - started) / 10_000 < 50e-6  # it takes 1 us; the limit is for a busy machine


def test_collectives_are_more_patient_than_the_watch() -> None:
    assert collective_timeout(1800, 300) > timedelta(seconds=2 * 1800)
    assert collective_timeout(None, 300) >= timedelta(days=1)


RANK = """
import os, sys, threading, time
from pathlib import Path
from ddp_train.system import stack_dump as stacks
from ddp_train.watchdog.client import FlightRecorder
from ddp_train.run_folder.paths import RunFolder

def be_torch():  # as the monitor thread of ProcessGroupNCCL does; it looks once a second
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe"
    os.mkfifo(pipe)
    time.sleep(0.1)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    while True:
        time.sleep(0.2)
        if os.read(descriptor, 128):
            Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_text("the last collectives")

stacks.dump_on_request()
recorder = FlightRecorder(3, RunFolder(Path(sys.argv[1])).logs)
os.environ.update(recorder.environment)
threading.Thread(target=be_torch, daemon=True).start()
recorder.hide_pipe(is_expected=True)
print(os.path.dirname(os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]), flush=True)
time.sleep(60)
"""


def test_before_a_hang_is_ended_the_record_is_written_into_the_logs_of_its_job(tmp_path: Path) -> None:
    job = RunFolder(tmp_path)
    job.logs.mkdir(parents=True)
    old = job.logs / "flight_recorder_rank_3"
    old.write_text("of an attempt before")
    arguments = [sys.executable, "-c", RANK, str(job.root)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert not Path(process.stdout.readline().strip()).exists()  # nothing is left behind, however the rank ends
        orders = WatchRequest(
            pids=[(3, process.pid)],
            world_size=1,
            run_folder=str(job.root),
            start_timeout_s=0.1,
            step_timeout_s=0.1,
            uses_device=True,
            is_shown=False,
        )
        watched = _WatchedRanks(orders)
        time.sleep(0.2)
        watched.check(time.monotonic())
        assert process.wait(10) == -9
    assert old.read_text() == "the last collectives"
    found = failure.load_report(job.failure)
    assert found is not None and found.stacks == "logs/stacks_*.txt, flight_recorder_rank_*"


def test_what_the_user_has_set_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/mine/trace_")
    recorder = FlightRecorder(0, tmp_path)
    assert set(recorder.environment) == {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}
    folder = Path(recorder.environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]).parent
    assert folder.exists()
    recorder.hide_pipe(is_expected=False)  # one rank: no process group
    assert not folder.exists()


@pytest.mark.parametrize(("given", "kept"), [({}, 0), ({"TORCH_FR_BUFFER_SIZE": "7"}, 1), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, 1)])
def test_under_gloo_torch_keeps_records_only_where_the_user_wants_some(given: dict[str, str], kept: int) -> None:
    lines = [
        "import json, os, torch, torch.distributed as dist",
        "from ddp_train.watchdog.client import without_records",
        "os.environ.update(without_records(os.environ))",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "dist.all_reduce(torch.ones(1))",
        "print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get('entries', [])), flush=True)",
        "os._exit(0)",  # gloo's threads may end a process that leaves with a group by SIGABRT (pytorch issue 190489)
    ]
    environment = {name: value for name, value in os.environ.items() if "TORCH_" not in name} | given
    answer = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split()[-1] == str(kept)  # gloo of torch 2.10 writes there, too


def test_ranks_without_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    request = RecordRequest({0: os.getpid()}, tmp_path)
    request.wait()
    assert not request.has_ranks
    assert time.monotonic() - started < 1
