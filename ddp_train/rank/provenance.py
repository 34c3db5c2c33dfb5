"""environment.json: what the run ran on and with, so that a result can be explained later."""

import os
import platform
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ddp_train import __version__
from ddp_train.checkpoint import catalog
from ddp_train.distributed.world import World
from ddp_train.errors import UserError
from ddp_train.launch.captured_code import ask_git, capture_code, software
from ddp_train.launch.job import Job
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_atomic, write_json
from ddp_train.system.redaction import redact_code

_SHARED_WITHIN_S = 20  # until a network file system shows what another machine wrote


@contextmanager
def recorded(job: Job, world: World) -> Iterator[None]:
    """Write environment.json (and the code that no commit has), after checking that all ranks agree. Collective.

    Git and the disk take their time: the files are written beside the block, and are there when it is left, however that is. A resumed
    run keeps the first ones.

    Raises UserError: a rank runs other code or another config than rank 0.
    """
    device_name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine()
    this_rank = {
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
        yield
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        writing = thread.submit(_write, job, world, ranks)
        yield
    writing.result()


def _write(job: Job, world: World, ranks: Sequence[Mapping[str, Any]]) -> None:
    saved_ids = (entry.run for entry in reversed(catalog.all_entries(job.run_folder.checkpoints)) if entry.run)
    commit = ask_git(Path.cwd(), "rev-parse", "HEAD") or ""  # of the code that the user stands in; "" outside a checkout
    if diff := ask_git(Path.cwd(), "diff", "HEAD") if commit else "":
        write_atomic(job.run_folder.code_diff, redact_code(os.fsencode(diff).decode(errors="replace")))  # a file may be of another encoding
    environment = {
        **software(),
        "run": next(saved_ids, secrets.token_hex(8)),  # a run that has lost this file keeps the id in its newest checkpoint
        "command": shlex.join(job.command),
        "overrides": job.overrides,
        "working_directory": os.getcwd(),
        "config_sha256": job.config.hash(),
        "batch": str(job.config.batch),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {"commit": commit.strip() or None, "dirty": diff if diff is None else bool(diff)},
        "code": [asdict(folder) for folder in capture_code(job.run_folder.code_archive, job.run_folder.spec)],
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


def _problem(ranks: Sequence[Mapping[str, Any]], job: Job) -> UserError | None:
    """Return what keeps ranks from training together, of the first that has something; None: nothing does."""
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
