"""A forked rank against a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_train.rank import forked
from ddp_train.system import process

PROBE = """
import ctypes, os, sys
if sys.argv[1] == "forked":
    os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np, threading, torch
from ddp_train.launch.fork_requests import RankRequest
from ddp_train.rank import forked
from ddp_train.system.process import fork, loaded_libraries
def tell():
    torch.manual_seed(0)
    each = [torch.get_num_threads(), torch.__config__.parallel_info()]
    thread = threading.Thread(target=lambda: each.append(torch.get_num_threads()))
    thread.start(); thread.join()
    a = torch.randn(300, 400)
    each.append((a @ a.T).double().sum().item())
    each.append(torch.nn.Conv2d(3, 8, 3)(torch.randn(4, 3, 32, 32)).double().sum().item())
    torch.nn.Linear(400, 10)(a).sum().backward()
    mkl = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
    each.append(mkl.mkl_serv_get_dynamic() if hasattr(mkl, "mkl_serv_get_dynamic") else None)  # may it use fewer threads?
    print(each, sys.argv[2:], flush=True)
    return 0
def forked_rank():
    os.environ["OMP_NUM_THREADS"] = sys.argv[2]  # as the agent has it, which the rank is forked from
    environment = {**os.environ, "OMP_NUM_THREADS": sys.argv[2]}
    forked.setup_forked_rank(RankRequest(environment=environment, words=sys.argv[2:], stdout="", stderr=""))
    sys.argv.insert(1, "forked")
    return tell()
sys.exit(fork(forked_rank).wait() if sys.argv[1] == "forked" else tell())
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_threads_and_results_are_those_of_a_fresh_interpreter(tmp_path: Path, threads: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROBE)
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    found = {
        kind: subprocess.run(
            [sys.executable, str(program), kind, threads], env=environment, capture_output=True, text=True, timeout=120, check=True
        ).stdout
        for kind in ("fresh", "forked")
    }
    assert found["forked"] == found["fresh"] != ""


def test_a_driver_that_another_library_has_opened_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["/dev/null", "/dev/nvidiactl"]  # NVML's, which may be forked
    monkeypatch.setattr(process, "open_files", lambda pid: [("", name) for name in files])
    assert not forked.has_used_gpu()
    files.append("/dev/nvidia-uvm")
    assert forked.has_used_gpu()
