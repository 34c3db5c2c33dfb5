"""A run folder as a run of one rank leaves it, made in this process without one."""

from __future__ import annotations

import json
from pathlib import Path

from ddp_train.config import auto
from ddp_train.distributed.world import alone
from ddp_train.training.build.build import build
from ddp_train.training.parts.components import Components
from tests.conftest import TINY_CONVNET
from tests.unit.parts import checked, saved


def finished(folder: Path, *overrides: str, step: int = 7, base: list[str] = TINY_CONVNET) -> Components:
    """Make the folder of a run that has saved after a step, and return what it was made of."""
    config = checked(*overrides, base=base)
    parts = build(config, alone())
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config.yaml({key: auto.yaml_value(value) for key, value in parts.answers.items()}))
    (folder / "checkpoints").mkdir()
    saved(folder / "checkpoints", step, parts)
    records = [{"split": "train", "step": 5, "loss": 2.5}, {"split": "eval", "step": step, "loss": 2.0, "accuracy": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return parts
