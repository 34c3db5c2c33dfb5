"""The Python that pages show outside of files runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ddp_train
from tests.docs.conftest import compose, problems_of
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.unit.archive.finished import a_sweep

PIECES = [block for page in PAGES for block in blocks(page) if block.is_python]
FINISHED: Any = SimpleNamespace(status="completed", metrics={"eval/accuracy": 0.5, "eval/loss": 2.3}, folder=Path("outputs/finished"))


def run(words: list[str]) -> Any:
    """Check what is to be run, and return the run that the test has made."""
    assert problems_of(words) == []
    return FINISHED


def both_turns(objective: type) -> None:
    """Compute the loss of each turn."""
    model = nn.ModuleDict({"generator": nn.Linear(16, 4), "discriminator": nn.Linear(4, 1)})
    parts = SimpleNamespace(**dict(model.items()))
    assert all(objective().turn_loss(parts, (torch.zeros(3, 4), None), turn).isfinite() for turn in objective.turns)  # type: ignore[attr-defined]


CALLS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda forward: forward(SimpleNamespace(encoder=nn.Flatten(), head=nn.Linear(4, 2)), torch.zeros(3, 4)),
    "Adversarial": both_turns,
    "main": lambda main: main.__wrapped__(compose(["model=mlp"])[0]),
    "test_a_few_steps_of_everything": lambda test: test(lambda *words: run([*words])),
}
"""How what a piece defines is called."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: f"{piece.page.relative_to(ROOT)}:{piece.line}")
def test_python_that_a_page_shows_runs(piece: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "piece", "torch": torch, "F": F, "hydra": hydra, "ddp_train": ddp_train}
    if "ddp_train.load(" in piece.text:
        words = ["cluster=cpu", "cluster.processes_per_node=1", "trainer.max_steps=1", f"hydra.run.dir={FINISHED.folder}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "ddp_train", *words], check=True, capture_output=True, env=environment)
        load = ddp_train.load
        monkeypatch.setattr(ddp_train, "load", lambda typed: load(FINISHED.folder), raising=False)
    if "ddp_train.runs(" in piece.text:
        a_sweep(Path("outputs"), "0.1", "0.2")
    monkeypatch.setattr(ddp_train, "run", run, raising=False)
    exec(compile(piece.text, str(piece.page), "exec"), names)
    defined = {name: value for name, value in names.items() if getattr(value, "__module__", "") == "piece"}
    for name, value in defined.items():
        CALLS[name](value)
    assert defined or "ddp_train." in piece.text
