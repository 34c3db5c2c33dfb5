"""A run as callbacks see it, without one: what they ask for is noted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def small_model() -> nn.Module:
    """Return a model with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@dataclass
class FakeRun:
    """Satisfies `interfaces.Run`."""

    step: int = 0
    total_steps: int = 100
    is_log_step: bool = True
    model: Any = field(default_factory=small_model)
    data: Any = None
    goals: Any = field(default_factory=lambda: {"accuracy": "max", "loss": "min"})
    metrics: Any = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    share_of_steps: float | None = None
    status: str = "running"
    rank: int = 0
    world_size: int = 1
    forward_is_collective: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    folder: Path = Path("outputs/fake")
    batch: Any = None
    stopped: str = ""
    logged: dict[str, Any] = field(default_factory=dict)  # numbers, images and texts
    trained: list[tuple[list[str], bool]] = field(default_factory=list)

    @property
    def optimizer(self) -> Any:
        return torch.optim.SGD([{"params": self.model.parameters(), "name": "all"}], lr=0.5)

    def goodput(self) -> float | None:
        return self.share_of_steps

    def log(self, name: str, value: float | Tensor) -> None:
        self.logged[name] = value

    def log_image(self, name: str, image: Tensor) -> None:
        self.logged[name] = image

    def log_text(self, name: str, text: str) -> None:
        self.logged[name] = text

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason

    def set_trained(self, names: Collection[str], is_trained: bool) -> None:
        self.trained.append((sorted(names), is_trained))

    def evaluation_batch(self) -> Any:
        return self.batch
