"""Every model and objective of conf/, with a batch that fits: each file is in one case at least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from ddp_train import CONF
from ddp_train.objective.supervised import LossObjective
from ddp_train.training.instantiate import instantiate

SAMPLES, CLASSES, TOKENS = 4, 10, 8
_IMAGES = {"image_shape": [3, 32, 32]}
_SMALL: dict[str, dict[str, Any]] = {
    "convnet": {**_IMAGES, "width": 4, "dropout": 0.1},
    "mini_resnet": {**_IMAGES, "width": 4, "blocks_per_stage": 1},
    "mlp": {**_IMAGES, "width": 8},
    "gpt": {"vocab_size": CLASSES, "context_length": TOKENS, "num_layers": 2, "num_heads": 2, "width": 8, "dropout": 0.1},
}
"""What conf/model has, small."""


class Pixelwise(nn.Module):
    """Gives logits of half the size of the images, which the objective resizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.conv(images)
        return logits


class OwnLoss(nn.Module):
    """Returns its loss itself, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def images() -> Tensor:
    return torch.randn(SAMPLES, 3, 32, 32)


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape)


_BATCHES: dict[str, tuple[int, Callable[[], Any]]] = {
    "binary": (1, lambda: (images(), torch.randint(2, (SAMPLES,)).float())),
    "classification": (CLASSES, lambda: (images(), labels(SAMPLES))),
    "contrastive": (CLASSES, lambda: (images(), images())),
    "custom": (CLASSES, lambda: (images(), labels(SAMPLES))),
    "distillation": (CLASSES, lambda: (images(), labels(SAMPLES))),
    "multilabel": (CLASSES, lambda: (images(), torch.randint(2, (SAMPLES, CLASSES)).float())),
    "regression": (1, lambda: (images(), torch.randn(SAMPLES))),
}
"""Objectives of what a model gives for an image -> how many numbers that are, and a batch."""

_OTHERS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "gpt, language_modeling": lambda: (model("gpt"), objective("language_modeling"), (labels(SAMPLES, TOKENS), labels(SAMPLES, TOKENS))),
    "gpt, language_modeling in chunks": lambda: (
        model("gpt"),
        objective("language_modeling", chunk_tokens=5, head="head", ignore_index=3),
        (labels(SAMPLES, TOKENS), labels(SAMPLES, TOKENS)),
    ),
    "custom, segmentation": lambda: (Pixelwise(), objective("segmentation", ignore_index=3), (images(), labels(SAMPLES, 32, 32))),
    "custom, transformers": lambda: (
        OwnLoss(),
        objective("transformers", unit="sample"),
        {"inputs": torch.randn(SAMPLES, 6), "labels": labels(SAMPLES)},
    ),
}

NAMES = [f"{made}, {wanted}" for made in _SMALL if made != "gpt" for wanted in _BATCHES] + list(_OTHERS)


def case(name: str) -> tuple[nn.Module, Any, Any]:
    """Return a model in training, an objective that knows it, and a batch, all on the CPU."""
    torch.manual_seed(0)
    if name in _OTHERS:
        return _OTHERS[name]()
    made, wanted = name.split(", ")
    outputs, batch = _BATCHES[wanted]
    return model(made, outputs), objective(wanted, made), batch()


def model(name: str, outputs: int = CLASSES) -> nn.Module:
    classes = {} if name == "gpt" else {"num_classes": outputs}
    made: nn.Module = instantiate({**config_of("model", name), **_SMALL[name], **classes}, key="model")
    return made


def objective(name: str, its_model: str = "", **changes: Any) -> Any:
    if name == "custom":
        return LossObjective(nn.CrossEntropyLoss(label_smoothing=0.1))
    own = config_of("objective", name)
    if name == "distillation":
        changes["teacher"] = {**config_of("model", its_model), **_SMALL[its_model], "num_classes": CLASSES}
    known = {"ignore_index": None, "bytes_per_token": 4.0, "head": "head"}
    answers = {key: value for key, value in known.items() if own.get(key) == "auto"}
    return instantiate({**own, **answers, **changes}, key="objective")


def files(group: str) -> set[str]:
    """Return the names of a group's files in conf/."""
    return {path.stem for path in (CONF / group).glob("*.yaml")}


def config_of(group: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    own: dict[str, Any] = found.get(group, found)  # a file of several groups has each by its name
    return own
