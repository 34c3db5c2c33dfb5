"""Where another process is, told by itself."""

from __future__ import annotations

import subprocess
import sys
import traceback

import pytest
import torch

from ddp_train.system import stack_dump


def test_a_main_thread_inside_native_code_is_told_from_one_that_runs_python() -> None:
    code = """
import ctypes
from ddp_train.system import stack_dump as stacks
stacks.dump_on_request()
lock = ctypes.create_string_buffer(64)
print("ready", flush=True)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            answers = [stack_dump.in_native_code([process.pid], within_s=0.3) for _ in range(3)]  # at first it may be on its way there
            assert answers[-1] == {process.pid}
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_that_has_not_registered_is_not_asked() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert stack_dump.ask([process.pid], within_s=0.1) == {}
        assert stack_dump.in_native_code([process.pid], within_s=0.1) == set()
        assert process.poll() is None  # the signal would have ended it
        process.kill()


def test_a_stack_is_described_by_what_goes_on_and_the_innermost_line_that_is_no_librarys() -> None:
    class Model(torch.nn.Module):
        def forward(self, stacks: list[traceback.StackSummary]) -> None:
            stacks.append(traceback.extract_stack())

    stacks: list[traceback.StackSummary] = []
    Model()(stacks)
    assert stack_dump.describe_stack(stacks[0]).startswith("in forward, test_stack_dump.py:")
    leaf = torch.ones((), requires_grad=True)
    leaf.register_hook(lambda gradient: stacks.append(traceback.extract_stack()))
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // 0
    assert stack_dump.describe_stack(traceback.extract_tb(caught.tb)).startswith("test_stack_dump.py:")
    leaf.backward()  # type: ignore[no-untyped-call]
    assert stack_dump.describe_stack(stacks[1]).startswith("in backward, test_stack_dump.py:")
