"""environment.json and the code of the run: what it ran on and with, so that a result can be explained and had again later."""

import os
import platform
import secrets
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torch

from ddp_train import __version__
from ddp_train.checkpoint import catalog
from ddp_train.distributed.world import World
from ddp_train.errors import UserError
from ddp_train.launch.captured_code import capture_code, software
from ddp_train.launch.job import Job
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_json

_SHARED_WITHIN_S = 20  # until a network file system shows what another machine wrote


def record_environment(job: Job, world: World) -> None:
    """Write environment.json, after checking that all ranks agree. A resumed run keeps the first one. Collective.

    Raises UserError: a rank runs other code or another config than rank 0.
    """
    device_name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine()
    this_rank: dict[str, Any] = {
        "host": socket.gethostname(),
        "sees_run_folder": wait_until(job.run_folder.config.exists, within_s=_SHARED_WITHIN_S, every_s=0.2),
        "device": f"{world.device} ({device_name})",
        "threads": torch.get_num_threads(),
        "config_sha256": job.config.hash(),
        "ddp_train": __version__,
        "torch": torch.__version__,
    }
    ranks = world.gather_to_main(this_rank)  # which alone writes them down: with thousands, each would have megabytes to read
    if (problem := world.from_main(lambda: _problem(ranks, job))) is not None:
        raise problem
    if not world.is_main or job.run_folder.environment.exists():
        return
    saved_ids = (entry.run for entry in reversed(catalog.all_entries(job.run_folder.checkpoints)) if entry.run)
    environment = {
        **software(),
        "run": next(saved_ids, secrets.token_hex(8)),  # a run that has lost this file keeps the id in its newest checkpoint
        "command": shlex.join(job.command),
        "overrides": job.overrides,
        "working_directory": os.getcwd(),
        "config_sha256": job.config.hash(),
        "batch": str(job.config.batch),
        "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),  # jobs of a sweep may take less than a second
        "ddp_train": __version__,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None,
        "world_size": world.size,
        "hosts": sorted({report["host"] for report in ranks}),
        "ranks": [{name: report[name] for name in ("host", "device", "threads")} for report in ranks],
    }
    write_json(job.run_folder.environment, environment)


@contextmanager
def code_captured(run_folder: RunFolder, world: World) -> Iterator[None]:
    """Keep the code of the run in a thread during the block, wait for it, and say what failed. A resumed run keeps the first one."""
    if not world.is_main or run_folder.code_list.exists():
        yield
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        capture = thread.submit(capture_code, run_folder)
        yield
    problems = [str(error)] if (error := capture.exception()) else [why for code in capture.result() if (why := code.differs.get("."))]
    for problem in problems:
        print(f"not all code of the run was kept: {problem}", flush=True)


def _problem(ranks: Sequence[Mapping[str, Any]], job: Job) -> UserError | None:
    """Return the first rank's reason why the ranks cannot train together; None: they can."""
    for rank, report in enumerate(ranks):
        if not report["sees_run_folder"]:
            happened = f"rank {rank} on {report['host']} does not see {job.run_folder.root}"
            expected = "a folder on a file system that all machines share: every rank writes its part of a checkpoint there"
            fix = "hydra.run.dir=FOLDER, or start from a shared folder"
            return UserError(key="hydra.run.dir", happened=happened, expected=expected, fix=fix)
        for name in ("config_sha256", "ddp_train", "torch"):
            if report[name] != ranks[0][name]:
                happened = f"rank {rank} on {report['host']} has {name} {report[name]}, rank 0 on {ranks[0]['host']} has {ranks[0][name]}"
                return UserError(happened=happened, expected="the same on all ranks", fix="install the same versions on every machine")
    return None
