"""How long a step takes, by the newest run of the same kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ddp_train.cli.plan_text import newest_like
from tests.unit.parts import checked


def run(folder: Path, *overrides: str, step_ms: float = 10.0, age_s: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(checked(*overrides).yaml({"model.num_classes": 10}))
    records = [{"split": "train", "step": step, "step_ms": step_ms + (500 if step == 1 else 0)} for step in range(1, 6)]
    lines = [json.dumps(record) for record in [*records, {"split": "eval", "step": 5, "loss": 1.0}]]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"split": "tr')
    (folder / "environment.json").write_text(json.dumps({"batch": "global batch 32"}))
    newest = 1_700_000_000 - age_s
    os.utime(folder / "metrics.jsonl", (newest, newest))
    return folder


def test_the_newest_run_with_this_model_data_and_precision_counts(tmp_path: Path) -> None:
    run(tmp_path / "old", "optimizer.lr=0.3", step_ms=30, age_s=100)
    mine = run(tmp_path / "new", "optimizer.lr=0.7", step_ms=20, age_s=50)
    run(tmp_path / "wider", "model.width=99", step_ms=1)
    run(tmp_path / "other_data", "data.num_samples=99", step_ms=1)
    run(tmp_path / "half", "amp=bf16", step_ms=1)
    assert newest_like(checked(), tmp_path) == (mine, 0.02)


def test_jobs_of_sweeps_count_and_what_cannot_be_read_does_not(tmp_path: Path) -> None:
    job = run(tmp_path / "sweeps/x/0", step_ms=5, age_s=9)
    (run(tmp_path / "damaged") / "config.yaml").write_text("a: [")
    (run(tmp_path / "of_before") / "config.yaml").write_text("model: {}\n")
    (run(tmp_path / "without") / "metrics.jsonl").write_text("")
    found = newest_like(checked(), tmp_path)
    assert found is not None and found[0] == job
    assert newest_like(checked(), tmp_path / "nothing") is None
