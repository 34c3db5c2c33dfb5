"""Folders of runs that have ended, as real ones leave them, without their training."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ddp_train.checkpoint.manifest import Manifest, Ranking
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, RunFolder, step_folder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.sweep import Sweep, SweepJob
from tests.unit.parts import checked

HEADLINE = Ranking(metric="eval/accuracy", goal="max")


@cache
def config_text(*overrides: str) -> str:
    return checked("model=mlp", "trainer.max_steps=100", *overrides).yaml()


def finished(
    root: Path,
    accuracy: float,
    *overrides: str,
    status: Status = Status.COMPLETED,
    started: int = 0,
    seconds: float = 5.0,
    **facts: Any,
) -> RunFolder:
    """Make the folder of a run that has ended after 100 steps and some seconds with an accuracy; `started`: seconds of its minute."""
    run_folder = RunFolder(root)
    run_folder.logs.mkdir(parents=True)
    run_folder.config.write_text(config_text(*overrides))
    environment = {
        "run": f"id of {root.name}",
        "command": f"ddp-train {' '.join(overrides)}",
        "overrides": [*overrides],
        "working_directory": str(root.parent),
        "started": f"2026-01-01T00:00:{started:02d}+0000",
        "world_size": 2,
        "hosts": ["a"],
        "packages": {"numpy": "2.0"},
        **facts,
    }
    run_folder.environment.write_text(json.dumps(environment))
    rows = [{"split": "train", "step": step, "loss": 100 / step} for step in range(10, 101, 10)]
    rows += [{"split": "eval", "step": step, "accuracy": accuracy * step / 100} for step in (50, 100)]
    run_folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    metrics = {"last": {"train/loss": 1.0, "eval/accuracy": accuracy}, "best": {"eval/accuracy": {"value": accuracy, "step": 100}}}
    Result(status=status, step=100, metrics=metrics, headline=vars(HEADLINE), seconds=seconds).write(run_folder.result)
    return run_folder


def saved(run_folder: RunFolder, step: int = 100, *, identity: dict[str, dict[str, Any]] | None = None) -> Path:
    """Save a checkpoint in a run's folder that holds nothing but the identity of its data."""
    checkpoint = run_folder.checkpoints / step_folder(step)
    checkpoint.mkdir(parents=True)
    plain = json.dumps({"data_identity": identity or {}}).encode()
    head = json.dumps({"shared": {"dtype": "U8", "shape": [len(plain)], "data_offsets": [0, len(plain)]}}).encode()
    content = len(head).to_bytes(8, "little") + head + plain
    (checkpoint / "rank_00000.safetensors").write_bytes(content)
    entry = {"rank_00000.safetensors": {"bytes": len(content), "xxh3_128": "0"}}
    manifest = Manifest(
        step=step,
        world_size=1,
        run=run_folder.run_id(),
        config_sha256="0",
        torch="2",
        metrics={"eval/accuracy": 0.5},
        ranked_by=HEADLINE,
        files=entry,  # type: ignore[arg-type]
    )
    (checkpoint / MANIFEST).write_bytes(manifest.to_bytes())
    (checkpoint / COMPLETE).write_text("")
    return checkpoint


def a_sweep(root: Path, *rates: str) -> Sweep:
    """Make the folder of a sweep over learning rates whose jobs have ended; a larger rate is better."""
    jobs = []
    for number, rate in enumerate(rates):
        finished(root / str(number), 0.5 + 0.1 * number, f"optimizer.lr={rate}", started=number)
        jobs.append(SweepJob(number=number, folder=str(number), overrides=[f"optimizer.lr={rate}"], identity=rate, status=Status.COMPLETED))
    sweep = Sweep(root=root, command=["-m"], keys=["optimizer.lr"], is_planned=True, metric="eval/accuracy", goal="max", jobs=jobs)
    sweep.save()
    return sweep
