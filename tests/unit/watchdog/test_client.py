"""What a rank asks of its watchdog; beats are read from another process, and cost little."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta

from ddp_train.system import stack_dump
from ddp_train.system.phase import Phase, Phases
from ddp_train.system.process import exit_code_of, state_of
from ddp_train.watchdog.client import HeartbeatReader, collective_timeout, write_heartbeats


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
