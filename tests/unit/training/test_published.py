"""The experiments with published settings compute what a script computes that is written from their descriptions, step for step.

The scripts are plain torch: networks as functions of named tensors, losses, optimizers and schedules of their own. From the run they take
the initial weights, which sample comes when, and what was drawn for it. Widths are tiny, and the run is float32 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.data.images.augment import random_integers
from ddp_train.distributed.world import alone
from ddp_train.model.gpt import GPT
from ddp_train.training.build import build_model
from ddp_train.training.components import Components
from tests.unit.data_files import write_cifar_binary, write_tokens
from tests.unit.parts import checked, components, trainer

NEAR: dict[str, float] = {"rel": 1e-5}
Named = dict[str, Tensor]


def run(parts: Components, **settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, and return the records of training and of evaluation."""
    records: list[dict[str, Any]] = []
    assert trainer(parts, write=lambda record: records.append(dict(record)), **settings).train()
    return ([each for each in records if each["split"] == split] for split in ("train", "eval"))  # type: ignore[return-value]


def initial(parts: Components) -> Named:
    """Return copies of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}


# GPT-2 124M, nanoGPT: https://github.com/karpathy/nanoGPT, config/train_gpt2.py and what its README says.

CONTEXT, STEPS, WARM_UP, BATCH, PARTS, CLIP = 16, 9, 3, 12, 2, 0.46  # clipped at 1.0 nothing of a model that small would be
TINY_GPT = [
    *["experiment=gpt2_124m", f"data.context_length={CONTEXT}", "model.num_layers=2", "model.num_heads=2", "model.width=16"],
    *["model.vocab_size=300", "compile=off", "amp=off", f"loader.micro_batch_size={BATCH // PARTS}", f"trainer.global_batch_size={BATCH}"],
    *[f"trainer.max_steps={STEPS}", f"scheduler.warmup_steps={WARM_UP}"],
]


def test_gpt2_124m_follows_a_script(tmp_path: Path) -> None:
    documents = np.random.default_rng(0).integers(0, 256, (3, 300)).tolist()
    root = write_tokens(tmp_path / "tokens", {"train": [documents[:1], documents[1:2]], "val": [documents[2:]]})
    parts = components(*TINY_GPT, f"data.root={root}", base=[])
    assert parts.train_loader.micro_steps(0) == PARTS
    data = np.concatenate([np.fromfile(file, np.uint16) for file in sorted(root.glob("train_*.bin"))])
    weights = initial(parts)
    starts = [parts.train_loader.sample_ids(step * BATCH, part) for step in range(STEPS) for part in range(PARTS)]
    batches = [
        [np.stack([data[at : at + CONTEXT + 1] for at in each]) for each in starts[i : i + PARTS]] for i in range(0, len(starts), PARTS)
    ]
    expected = [*nano_gpt(weights, batches)]
    trained, _ = run(parts, clip_grad_norm=CLIP)
    assert [record["loss"] for record in trained] == pytest.approx([loss for loss, _ in expected], **NEAR)
    assert [record["grad_norm"] for record in trained] == pytest.approx([norm for _, norm in expected], **NEAR)
    assert min(norm for _, norm in expected) < CLIP < max(norm for _, norm in expected)
    for name, parameter in parts.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-4, atol=1e-6)


def nano_gpt(weights: Named, batches: list[list[Any]]) -> Iterator[tuple[float, float]]:
    """Train on the windows of each step, in micro-batches; yield the mean loss and the norm of the gradient. Changes the weights."""
    parameters = {name: weight.requires_grad_() for name, weight in weights.items()}
    decayed = [each for each in parameters.values() if each.dim() >= 2]
    others = [each for each in parameters.values() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8)
    for step, windows in enumerate(batches):
        if step < WARM_UP:
            rate = 6e-4 * (step + 1) / (WARM_UP + 1)
        else:
            share = (step - WARM_UP) / (len(batches) - 1 - WARM_UP)
            rate = 6e-5 + 0.5 * (1 + math.cos(math.pi * share)) * (6e-4 - 6e-5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for window in windows:
            tokens = torch.from_numpy(window.astype(np.int64))
            loss = F.cross_entropy(gpt(parameters, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / len(windows)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total, norm.item()


def gpt(weights: Named, tokens: Tensor) -> Tensor:
    """GPT-2 of two layers and two heads, without biases: pre-norm, causal attention, GELU, the head tied to the embedding."""
    table = weights["token_embedding.weight"]
    width = table.shape[1]
    hidden = table[tokens] + weights["position_embedding.weight"][: tokens.shape[1]]
    future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for layer in ("blocks.0", "blocks.1"):
        normed = F.layer_norm(hidden, [width], weights[f"{layer}.attention_norm.weight"])
        queries, keys, values = (normed @ weights[f"{layer}.attention.query_key_value.weight"].T).split(width, dim=2)
        heads = []
        for part in (slice(0, width // 2), slice(width // 2, width)):
            scores = queries[..., part] @ keys[..., part].transpose(1, 2) / math.sqrt(width // 2)
            heads.append(scores.masked_fill(future, float("-inf")).softmax(dim=2) @ values[..., part])
        hidden = hidden + torch.cat(heads, dim=2) @ weights[f"{layer}.attention.project.weight"].T
        normed = F.layer_norm(hidden, [width], weights[f"{layer}.mlp_norm.weight"])
        wide = normed @ weights[f"{layer}.mlp.widen.weight"].T
        wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
        hidden = hidden + wide @ weights[f"{layer}.mlp.project.weight"].T
    return F.layer_norm(hidden, [width], weights["norm.weight"]) @ table.T


def test_gpt2_124m_is_of_the_published_size_and_batch() -> None:
    config = checked("experiment=gpt2_124m", "data.root=tokens", base=[])
    assert config.batch.global_batch_size * config.data["context_length"] == 491_520
    assert (config.trainer.max_steps, config.scheduler["warmup_steps"], config.trainer.clip_grad_norm) == (600_000, 2000, 1.0)
    assert (config.compile.mode, config.amp["dtype"]) == ("default", "bfloat16")
    model = build_model(config, alone("meta"), {"model.context_length": config.data["context_length"]})
    assert isinstance(model, GPT)
    without_positions = sum(parameter.numel() for parameter in model.parameters()) - model.position_embedding.weight.numel()
    assert without_positions == 123_587_328  # with the vocabulary of 50,304; nanoGPT says 123.59M


# airbench94: Jordan 2024, arXiv:2404.00498, listing and section 3.

EPOCHS, EPOCH_STEPS, IMAGES, FROZEN_FROM, EVERY = 7, 2, 16, 4, 3
AIRBENCH = [
    *["experiment=airbench94", "model.width=4", f"trainer.global_batch_size={IMAGES}", f"loader.micro_batch_size={IMAGES}"],
    *[f"trainer.max_steps={EPOCHS * EPOCH_STEPS}", f"callbacks.freeze.from_step={FROZEN_FROM}", "model.whitening_samples=24"],
    *[f"callbacks.lookahead.start_step={FROZEN_FROM}", f"callbacks.lookahead.every_steps={EVERY}"],
    *[f"callbacks.lookahead.return_every_steps={EPOCH_STEPS}", "seed=3"],
    # Rate and decay are for 1,024 samples a step.
    *[f"optimizer.lr={11.5 * IMAGES / 1024}", f"optimizer.weight_decay={0.0153 * IMAGES / 1024}"],
]
MEAN, STD = (torch.tensor(each).view(3, 1, 1) for each in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))


@pytest.mark.parametrize("on_device", [True, pytest.param(False, marks=pytest.mark.long)])
def test_airbench94_follows_a_script(tmp_path: Path, on_device: bool) -> None:
    files = write_cifar_binary(tmp_path, per_file=8)  # 40 images: two steps of 16 an epoch, and eight are left out
    raw = {split: pixels_of(files, split) for split in ("data", "test")}
    parts = components(*AIRBENCH, f"data.root={files}", f"loader.on_device={on_device}", base=[])
    weights = initial(parts)
    torch.testing.assert_close(covariance(F.conv2d(raw["data"][0][:24], weights["whitening.weight"])), both_signs(), atol=0.05, rtol=0)
    order = parts.train_loader.order
    assert order.steps_per_epoch == EPOCH_STEPS
    batches = []
    for step in range(EPOCHS * EPOCH_STEPS):
        ids, epoch = parts.train_loader.sample_ids(step * IMAGES, 0), step // EPOCH_STEPS
        keys, sides = (order.sample_keys(each, ids) for each in (epoch, 0))  # type: ignore[attr-defined]
        moves = zip(*(random_integers(keys, draw, below=5) for draw in (0, 1)), strict=True)
        is_mirrored = (random_integers(sides, 3, below=2) == 1) ^ (epoch % 2 == 1)
        batches.append(
            (torch.stack([seen(raw["data"][0][i], *m, f) for i, m, f in zip(ids, moves, is_mirrored, strict=True)]), raw["data"][1][ids])
        )
    expected = [*airbench94(weights, batches)]
    trained, (evaluated,) = run(parts, evaluate_every_steps=EPOCHS * EPOCH_STEPS)
    assert [record["loss"] for record in trained] == pytest.approx(expected, **NEAR)
    logits = six_views(weights, raw["test"][0])
    assert evaluated["loss"] == pytest.approx(F.cross_entropy(logits, raw["test"][1]).item(), **NEAR)
    assert evaluated["accuracy"] == (logits.argmax(1) == raw["test"][1]).float().mean().item()


def pixels_of(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return normalised images and labels of the binary files."""
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in sorted(folder.glob(f"{split}_batch*.bin"))])
    images = (torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)).float() / 255 - MEAN) / STD
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def seen(image: Tensor, top: int, left: int, is_mirrored: bool) -> Tensor:
    """Return an image moved by up to two pixels, mirrored at its border, and perhaps mirrored as a whole."""
    moved = F.pad(image[None], (2, 2, 2, 2), mode="reflect")[0, :, top : top + 32, left : left + 32]
    return moved.flip(2) if is_mirrored else moved


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
