"""Folders of runs and sweeps as a run leaves them, small and fast, for tests of the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ddp_train.config.schema import SECTIONS

PARTS = ("data", "forward", "backward", "communication", "optimizer", "evaluation", "checkpoint", "other")


def write_run(folder: Path, *, seed: int = 0, lr: float = 0.1, steps: int = 60, nans: tuple[int, ...] = (), **extra: Any) -> Path:
    """Write a run of `steps` steps that is done: with losses, evaluations, events, times of two ranks, and predictions."""
    draw = random.Random(f"{seed} {lr}")
    folder.mkdir(parents=True)
    config = {section: {} for section in SECTIONS} | {"seed": seed, "optimizer": {"lr": lr, "betas": [0.9, 0.95]}, **extra}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"command": f"/bin/ddp-train seed={seed} optimizer.lr={lr}", "overrides": [], "world_size": 2, "hosts": ["a"]}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "code.json").write_text(json.dumps({"folders": [{"name": "m", "folder": "/m", "commit": "a" * 40, "changed": ["m.py"]}]}))
    head = {"started": 1000.0, "restart": False, "queued": False, "step": 0, "hosts": ["a", "b"], "not_split": {"communication": "gloo"}}
    records, times = [], [{**head, "parts": list(PARTS)}]
    for step in range(1, steps + 1):
        at = {"step": step, "epoch": step / 20, "samples": 32 * step, "time": 1010.0 + step}
        loss = None if step in nans else 2 * math.exp(-step * lr) + 0.1 * draw.random()
        records.append({"split": "train", **at, "loss": loss, "lr": lr, "step_ms": 10 + draw.random()})
        if step % 10 == 0:
            records.append({"split": "eval", **at, "accuracy": 1 - math.exp(-step * lr) - 0.02 * draw.random(), "loss": 0.5})
        ranks = [[0.01, 0.2, 0.3, None, 0.1, 0.0, 0.0, 0.05], [0.01, 0.3 if step > 30 else 0.2, 0.3, None, 0.1, 0.0, 0.0, 0.05]]
        times.append({"step": step, "time": at["time"], "seconds": 1.0, "steps": 1, "ranks": ranks})
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "times.jsonl", times)
    write_lines(folder / "events.jsonl", [{"time": 1.0, "kind": "spike", "step": 20, "loss": 9.0, "zscore": 8.5, "sample_ids": [1, 2, 3]}])
    last = {f"{row['split']}/{name}": row[name] for row in records for name in ("loss", "accuracy", "lr", "step_ms") if name in row}
    best = max((row["accuracy"], row["step"]) for row in records if "accuracy" in row)
    headline = {"metric": "eval/accuracy", "goal": "max"}
    metrics = {"last": last, "best": {"eval/accuracy": {"value": best[0], "step": best[1]}}}
    result = {"status": "completed", "step": steps, "samples": 32 * steps, "metrics": metrics, "headline": headline, "seconds": steps * lr}
    (folder / "result.json").write_text(json.dumps(result))
    predictions = folder / f"predictions/step_{steps:08d}"
    predictions.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    target = np.arange(200) % 5
    answer = np.where(rng.random(200) < 0.8, target, rng.integers(0, 5, 200))
    arrays = {"target": target, "prediction": answer, "probability": rng.uniform(0.4, 1, 200).astype(np.float32), "loss": rng.random(200)}
    for name, values in arrays.items():
        np.save(predictions / f"{name}.npy", values)
    return folder


def write_sweep(folder: Path, *, lrs: tuple[float, ...] = (0.02, 0.05, 0.1), seeds: tuple[int, ...] = (0, 1)) -> Path:
    """Write a sweep over learning rates and seeds."""
    jobs = []
    for number, (lr, seed) in enumerate((lr, seed) for lr in lrs for seed in seeds):
        write_run(folder / str(number), lr=lr, seed=seed)
        overrides = [f"optimizer.lr={lr}", f"seed={seed}"]
        jobs.append({"number": number, "folder": str(number), "overrides": overrides, "identity": "", "status": "completed", "attempts": 1})
    sweep = {
        "command": ["-m"],
        "keys": ["optimizer.lr", "seed"],
        "is_planned": True,
        "metric": "eval/accuracy",
        "goal": "max",
        "jobs": jobs,
    }
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
