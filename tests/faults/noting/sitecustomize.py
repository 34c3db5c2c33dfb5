"""In every Python process of a test: notes at its end which collectives it has called (`tests/faults/in_order.py`).

torch's flight recorder has them in order, those that DDP calls in C++ too, under gloo as under NCCL.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from typing import Any

_SAID = ("process_group", "profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "time_created_ns")
_noted: set[int] = set()
_exit = os._exit


def _note() -> None:
    torch_c: Any = sys.modules.get("torch._C._distributed_c10d")
    folder = os.environ.get("COLLECTIVES_NOTED_IN", "")
    if torch_c is None or not folder or os.getpid() in _noted or "RANK" not in os.environ:
        return
    _noted.add(os.getpid())
    entries = json.loads(torch_c._dump_fr_trace_json()).get("entries", [])
    if not entries:
        return
    calls = [{name: entry[name] for name in _SAID} for entry in entries]
    place = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    said = {"group": [os.getcwd(), *place], "rank": int(os.environ["RANK"]), "size": int(os.environ["WORLD_SIZE"]), "calls": calls}
    path = f"{folder}/{os.getpid()}_{time.monotonic_ns()}"
    with open(path, "w") as file:
        json.dump(said, file)
    os.rename(path, f"{path}.json")  # a process that is killed meanwhile leaves no half note


def _leave(code: int) -> None:
    _note()
    _exit(code)


os._exit = _leave  # type: ignore[assignment]
atexit.register(_note)
