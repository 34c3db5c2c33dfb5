"""Memory that is freed stays with the process, so that a step asks the kernel for none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, resource
import torch
from ddp_train.system.malloc import keep_freed

keep_freed(os.environ)
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(1 << 20) for _ in range(6)]
    del kept
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[10:]))
"""


def faults(**environment: str) -> int:
    """Return how many pages ten steps of 24 MiB asked for."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_a_step_takes_again_what_the_step_before_has_freed() -> None:
    assert faults() < 100  # of 60,000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
@pytest.mark.parametrize("own", [{"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}], ids=str)
def test_who_has_set_it_is_left_alone(own: dict[str, str]) -> None:
    assert faults(**own) > 10_000
