"""The experiment with published settings computes what a script computes that is written from its description, step for step.

The script is plain torch: a network as a function of named tensors, a loss, optimizer and schedule of its own. From the run it takes the
initial weights, and which sample comes when. The width is tiny, and the run is float32 on the CPU. tests/examples has another one.
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

from ddp_train.distributed.world import alone
from ddp_train.model.gpt import GPT
from ddp_train.training.build.model import build_model
from ddp_train.training.parts.components import Components
from tests.unit.data_files import write_tokens
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
    assert parts.train_loader.num_micro_batches(0) == PARTS
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
