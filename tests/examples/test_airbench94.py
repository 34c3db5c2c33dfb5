"""examples/airbench94 needs nothing inside ddp_train: its own tests pass where it lies alone, and it computes what a script computes.

The script is plain torch, written from the description (Jordan 2024, arXiv:2404.00498, listing and section 3): a network as a function of
named tensors, a loss, optimizer and schedule of its own. From the run it takes the initial weights, which sample comes when, and what was
drawn for it. The width is tiny, and the run is float32 on the CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.data.images.image_array import random_integers
from tests.unit.data_files import write_cifar_binary
from tests.unit.parts import components, trainer

EXAMPLE = Path(__file__).parents[2] / "examples/airbench94"
NEAR: dict[str, float] = {"rel": 1e-5}
Named = dict[str, Tensor]


@pytest.mark.distributed
def test_its_own_tests_pass_outside_of_the_repository(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "airbench94", ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_imports_the_seams_and_classes_that_a_configuration_names() -> None:
    found = {
        name for file in EXAMPLE.rglob("*.py") for name in re.findall(r"^from (ddp_train[\w.]*)", file.read_text(), flags=re.MULTILINE)
    }
    seams = {"ddp_train.interfaces", *(f"ddp_train.interfaces.{module}" for module in ("batch", "strategy"))}
    assert found == seams | {"ddp_train", "ddp_train.data.cifar10", "ddp_train.objective.classification"}


@pytest.fixture
def in_the_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let its modules be found, as where a user stands in its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "airbench94"]:
        del sys.modules[name]


EPOCHS, EPOCH_STEPS, IMAGES, FROZEN_FROM, EVERY = 7, 2, 16, 4, 3
AIRBENCH = [
    *[
        f"hydra.searchpath=[file://{EXAMPLE}/conf]",
        "model.width=4",
        f"trainer.global_batch_size={IMAGES}",
        f"loader.micro_batch_size={IMAGES}",
    ],
    *[f"trainer.max_steps={EPOCHS * EPOCH_STEPS}", f"callbacks.freeze.from_step={FROZEN_FROM}", "callbacks.whiten.num_images=24"],
    *[f"callbacks.lookahead.start_step={FROZEN_FROM}", f"callbacks.lookahead.every_steps={EVERY}"],
    *[f"callbacks.lookahead.return_every_steps={EPOCH_STEPS}", "seed=3"],
    # Rate and decay are for 1,024 samples a step.
    *[f"optimizer.lr={11.5 * IMAGES / 1024}", f"optimizer.weight_decay={0.0153 * IMAGES / 1024}"],
]
MEAN, STD = (torch.tensor(each).view(3, 1, 1) for each in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))


@pytest.mark.usefixtures("in_the_example")
@pytest.mark.parametrize("on_device", [True, pytest.param(False, marks=pytest.mark.long)])
def test_it_follows_a_script(tmp_path: Path, on_device: bool) -> None:
    files = write_cifar_binary(tmp_path, per_file=8)  # 40 images: two steps of 16 an epoch, and eight are left out
    raw = {split: pixels_of(files, split) for split in ("data", "test")}
    parts = components(*AIRBENCH, f"data.root={files}", f"loader.on_device={on_device}", base=[])
    weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    order = parts.train_loader.order
    assert order.steps_per_epoch == EPOCH_STEPS
    batches, sides = [], np.zeros((EPOCHS, 40), int)
    for step in range(EPOCHS * EPOCH_STEPS):
        ids, epoch = parts.train_loader.sample_ids(step * IMAGES, 0), step // EPOCH_STEPS
        moves = zip(*(random_integers(order.sample_keys(epoch, ids), draw, below=5) for draw in (0, 1)), strict=True)  # type: ignore[attr-defined]
        images, is_mirrored = ids % 40, ids >= 40
        sides[epoch, images] = np.where(is_mirrored, 1, -1)
        batches.append(
            (
                torch.stack([seen(raw["data"][0][i], *m, f) for i, m, f in zip(images, moves, is_mirrored, strict=True)]),
                raw["data"][1][images],
            )
        )
    assert (sides[1:] * sides[:-1] <= 0).all() and (np.abs(sides).sum(axis=1) == 32).all()  # 0: left out in that epoch
    records: list[dict[str, Any]] = []
    trained = trainer(parts, write=lambda record: records.append(dict(record)), evaluate_every_steps=EPOCHS * EPOCH_STEPS)
    assert trained.train()
    *losses, evaluated = records
    weights["whitening.weight"] = parts.model.get_buffer("whitening.weight")
    torch.testing.assert_close(covariance(F.conv2d(raw["data"][0][:24], weights["whitening.weight"])), both_signs(), atol=0.05, rtol=0)
    assert [record["loss"] for record in losses] == pytest.approx([*airbench94(weights, batches)], **NEAR)
    logits = six_views(weights, raw["test"][0])
    assert evaluated["loss"] == pytest.approx(F.cross_entropy(logits, raw["test"][1]).item(), **NEAR)
    assert evaluated["accuracy"] == (logits.argmax(1) == raw["test"][1]).float().mean().item()


def pixels_of(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return normalised images and labels of the binary files."""
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in sorted(folder.glob(f"{split}_batch*.bin"))])
    images = (torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)).float() / 255 - MEAN) / STD
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def seen(image: Tensor, top: int, left: int, is_mirrored: bool) -> Tensor:
    """Return an image, perhaps mirrored, moved by up to two pixels; what comes in at its border is the image mirrored there."""
    image = image.flip(2) if is_mirrored else image
    return F.pad(image[None], (2, 2, 2, 2), mode="reflect")[0, :, top : top + 32, left : left + 32]


def covariance(features: Tensor) -> Tensor:
    """Return the mean products of the channels over all places."""
    rows = features.transpose(0, 1).flatten(1)
    return rows @ rows.T / rows.shape[1]


def both_signs() -> Tensor:
    """Return the covariance of twelve values that have nothing to do with each other, and of the same with the other sign."""
    return torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).kron(torch.eye(12))


def airbench94(weights: Named, batches: list[tuple[Tensor, Tensor]]) -> Iterator[float]:
    """Train on the batches of each step; yield the loss. Changes the weights, to which it adds batch norms' running averages."""
    scale = 1024 * (1 + 1 / (1 - 0.85))
    rate, decay = 11.5 / scale, 0.0153 * IMAGES / scale
    rates = {name: rate * 64 if "norm" in name else rate for name in weights}
    fixed = {name for name in weights if name == "whitening.weight" or name.endswith(("norm1.weight", "norm2.weight"))}
    momenta: Named = {}
    for name in [name for name in weights if name.endswith(("norm1.bias", "norm2.bias"))]:
        layer = name.removesuffix(".bias")
        weights |= {f"{layer}.running_mean": torch.zeros_like(weights[name]), f"{layer}.running_var": torch.ones_like(weights[name])}
    slow: Named = {}
    total = len(batches)
    for step, (images, labels) in enumerate(batches):
        if step == FROZEN_FROM:
            fixed.add("whitening.bias")
        trained = [name for name in rates if name not in fixed]
        for name in trained:
            weights[name].requires_grad_()
        loss = F.cross_entropy(network(weights, images, is_training=True), labels, label_smoothing=0.2, reduction="sum")
        gradients = torch.autograd.grad(loss, [weights[name] for name in trained])
        peak = int(0.23 * total)
        factor = 0.2 + 0.8 * step / peak if step < peak else 1 - 0.93 * (step - peak) / (total - peak)
        with torch.no_grad():
            for name, gradient in zip(trained, gradients, strict=True):
                change = gradient + decay / rates[name] * weights[name]
                momenta[name] = change if name not in momenta else 0.85 * momenta[name] + change
                weights[name] -= factor * rates[name] * (change + 0.85 * momenta[name])
            done = step + 1
            if done > FROZEN_FROM and done % EVERY == 0:
                if slow:
                    keeps = 0.95**EVERY * (done / total) ** 3
                    for name, weight in weights.items():
                        slow[name] = keeps * slow[name] + (1 - keeps) * weight
                        weight.copy_(slow[name])
                else:
                    slow = {name: weight.clone() for name, weight in weights.items()}
            if slow and done % EPOCH_STEPS == 0:
                for name, weight in weights.items():
                    weight.copy_(slow[name])
        yield loss.item() / len(labels)


def network(weights: Named, images: Tensor, *, is_training: bool) -> Tensor:
    features = F.gelu(F.conv2d(images, weights["whitening.weight"], weights["whitening.bias"]))
    for group in ("groups.0", "groups.1", "groups.2"):
        for number in (1, 2):
            features = F.conv2d(features, weights[f"{group}.conv{number}.weight"], padding=1)
            features = F.max_pool2d(features, 2) if number == 1 else features
            norm = f"{group}.norm{number}"
            mean, variance = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
            features = F.gelu(F.batch_norm(features, mean, variance, None, weights[f"{norm}.bias"], is_training, 0.4, 1e-12))
    return F.max_pool2d(features, 3).flatten(1) @ weights["head.weight"].T / 9


@torch.no_grad()
def six_views(weights: Named, images: Tensor) -> Tensor:
    """Return the logits: each of the image as it is and its mirror image weighs a quarter, each of the four that are moved an eighth."""
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    found = torch.zeros(len(images), 10)
    for view, weight in ((images, 1 / 4), (padded[:, :, :32, :32], 1 / 8), (padded[:, :, 2:, 2:], 1 / 8)):
        found += weight * (network(weights, view, is_training=False) + network(weights, view.flip(3), is_training=False))
    return found
