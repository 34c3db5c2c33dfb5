"""The record says what a run gets done, by numbers that a hand can check."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train import model_log
from ddp_train.amp import Amp
from ddp_train.distributed.world import World, alone
from ddp_train.objective.classification import Classification
from ddp_train.objective.distillation import Distillation
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.strategy.fsdp import FSDP
from ddp_train.system.process import resident_bytes
from ddp_train.training.build import build
from ddp_train.training.record.records import Record
from ddp_train.training.record.throughput import ShapeCopy, Throughput, lookup, peak_of, products
from tests.unit.parts import components, trainer
from tests.unit.training.ragged import Ragged, ragged_components

FOUR = World(rank=0, size=4, local_rank=0, local_size=4, device=torch.device("cpu"))


def values(measured: Throughput, **changes: Any) -> dict[str, float]:
    return measured.values(**{"samples": 80, "num_units": [100.0, 60.0], "seconds": 2.0, "memory": [4.0]} | changes)


def test_rates_are_those_of_all_ranks_and_of_each_device() -> None:
    assert values(Throughput(world=FOUR)) == {"samples_per_s": 40, "samples_per_s_per_device": 10, "device/host_gib": 1.0}


def test_tokens_are_what_the_objective_weighs_or_what_the_windows_hold() -> None:
    counted = values(Throughput(world=FOUR, objective=LanguageModeling(), tokens_per_sample=7))
    assert (counted["tokens_per_s"], counted["tokens_per_s_per_device"]) == (80, 20)
    assert values(Throughput(world=FOUR, tokens_per_sample=7))["tokens_per_s"] == 280


def test_the_share_of_the_peak_is_operations_per_second_over_what_all_devices_can_do() -> None:
    model = nn.Linear(8, 3)
    measured = Throughput(world=FOUR, objective=components().objective, peak=1e6, shapes=ShapeCopy(model, components().objective))
    assert measured.wants_batch
    measured.see((torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)))
    flops_per_sample = 2 * (2 * 8 * 3)  # forward, and backward of the weight
    assert values(measured)["mfu"] == pytest.approx(80 / 2.0 * flops_per_sample / 4e6)
    assert not measured.wants_batch and values(measured)["mfu"] == values(measured)["mfu"]


def test_the_process_takes_memory() -> None:
    before = Throughput(world=alone()).memory()[0]
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert len(Throughput(world=alone()).memory()) == 1
    assert Throughput(world=alone()).memory()[0] - before > 0.05
    assert resident_bytes() > block.nbytes


def train(monkeypatch: pytest.MonkeyPatch, *, peak: float | None, model: type[nn.Module] | None = None) -> list[Record]:
    """Train on ragged windows, as if the device had this peak."""
    monkeypatch.setattr(build, "peak_of", lambda device, amp, model, *, cast: peak)
    records = list[Record]()
    added = (
        [] if model is None else [f"model._target_={__name__}.{model.__name__}", "~model.num_layers", "~model.num_heads", "~model.width"]
    )
    parts = ragged_components("trainer.max_steps=4", "trainer.global_batch_size=3", *added)
    trainer(parts, write=records.append, log_every_steps=2).train()
    return [record for record in records if record["split"] == "train"]


def test_a_run_measures_tokens_and_the_share_of_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = train(monkeypatch, peak=1e9)
    for record in (first, second):
        assert 0 < record["tokens_per_s"] == record["tokens_per_s_per_device"]
        assert record["mfu"] > 0 and record["device/host_gib"] > 0.01
    counts = [int((Ragged().targets[sample] != -100).sum()) for sample in range(12)]
    steps = (record["samples_per_s"] / record["tokens_per_s"] for record in (first, second))
    assert sum(2 * 3 / ratio for ratio in steps) == pytest.approx(sum(counts))  # one epoch: as many tokens as count
    assert first["mfu"] / first["tokens_per_s"] == pytest.approx(second["mfu"] / second["tokens_per_s"])


def test_where_the_peak_is_not_known_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShapeCopy, "__init__", lambda *arguments: pytest.fail("a copy was made"))
    assert "mfu" not in train(monkeypatch, peak=None)[0]


class Asking(nn.Module):
    """A model whose shapes depend on values, as no copy without values can tell."""

    def __init__(self, vocab_size: int, **_: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.table(tokens_BT) * float(tokens_BT.sum().item() >= 0)


def test_a_model_that_cannot_be_counted_trains_without_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = train(monkeypatch, peak=1e9, model=Asking)
    assert len(records) == 2 and all("mfu" not in record for record in records)
    assert capsys.readouterr().out.count("mfu      left out: the operations of a step cannot be counted (RuntimeError: ") == 1


CPU = torch.device("cpu")
BATCH = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))


def test_a_perceptron_takes_what_a_hand_counts() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    forward = 2 * 4 * (8 * 16 + 16 * 3)
    without_input_gradient = 2 * 4 * 8 * 16  # of the first layer, which nobody wants
    assert ShapeCopy(model, Classification()).count(BATCH, CPU) == 3 * forward - without_input_gradient


def test_a_language_model_takes_six_operations_a_parameter_and_token_and_its_attention() -> None:
    parts = ragged_components()
    tokens, targets = parts.train_loader.source.batch(parts.train_loader.order.indices(0, 0, 4))
    counted = ShapeCopy(parts.model, parts.objective).count((tokens, targets), CPU) / tokens.numel()
    matrices = sum(parameter.numel() for parameter in parts.model.parameters() if parameter.ndim == 2)
    assert 6 * matrices * 0.7 < counted < 6 * matrices * 1.3  # the position's embedding is no product; attention is one


def test_what_is_frozen_and_a_teacher_take_no_backward() -> None:
    one = 2 * 4 * 8 * 3  # a product of this size
    model = nn.Linear(8, 3)
    assert ShapeCopy(model, Classification()).count(BATCH, CPU) == 2 * one
    assert ShapeCopy(model, Distillation(teacher=nn.Linear(8, 3))).count(BATCH, CPU) == 3 * one
    frozen = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), model)
    assert ShapeCopy(frozen, Classification()).count(BATCH, CPU) == 2 * one + 2 * 4 * 8 * 8


class Drawing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        random.random()
        torch.rand(1)
        ddp_train.log("drawn", torch.ones((), device=inputs.device))
        return super().forward(inputs)


def test_counting_draws_nothing_logs_nothing_and_leaves_the_model_alone() -> None:
    model, logged = Drawing(8, 3), list[str]()
    before, python = torch.get_rng_state(), random.getstate()
    with model_log.taken_by(lambda name, value: logged.append(name)):
        assert ShapeCopy(model, Classification()).count(BATCH, CPU) > 0
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python
    assert logged == []
    assert model.weight.grad is None and model.weight.device == CPU


class AskingLinear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1.0 if inputs.sum().item() > 0 else 2.0)


def test_a_model_that_needs_values_cannot_be_counted() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        ShapeCopy(AskingLinear(8, 3), Classification()).count(BATCH, CPU)


def test_an_objective_with_weights_of_its_own_is_counted_with_them() -> None:
    parts = components()
    inputs, labels = parts.train_loader.source.batch(parts.train_loader.order.indices(0, 0, 4))
    assert ShapeCopy(parts.trained_module, parts.objective).count((inputs, labels), CPU) > 0


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H20", 148),
        ("NVIDIA H800", 989.4),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, tera: float | None) -> None:
    assert lookup(name, "bfloat16") == (None if tera is None else tera * 1e12)


def test_each_type_has_a_peak_of_its_own() -> None:
    assert [lookup("NVIDIA A100-SXM4-40GB", each) for each in ("float32", "tf32", "float16", "float64")] == [19.5e12, 156e12, 312e12, None]
    assert lookup("Tesla T4", "float16") == 65e12


def test_the_type_is_the_one_in_which_a_strategy_lets_the_weights_compute() -> None:
    cpu, model = torch.device("cpu"), nn.Linear(1, 1)
    in_half, plain = FSDP(param_dtype="bfloat16"), FSDP()
    assert products(Amp(dtype=None), model, cpu, cast=in_half.param_dtype) == "bfloat16"
    assert products(Amp(dtype=None), model, cpu, cast=plain.param_dtype) == "float32"
    assert products(Amp(dtype="float16"), model, cpu, cast=in_half.param_dtype) == "float16"


def test_a_cpu_has_none() -> None:
    assert peak_of(torch.device("cpu"), Amp(dtype=None), nn.Linear(1, 1)) is None


@pytest.fixture
def tf32() -> Iterator[Callable[[bool], None]]:
    """Give what allows and forbids it for matrix products."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda is_allowed: setattr(matmul, "allow_tf32", is_allowed)
    matmul.allow_tf32 = before


def test_the_type_is_that_of_autocast_else_that_of_the_weights(tf32: Callable[[bool], None]) -> None:
    cpu, model, off = torch.device("cpu"), nn.Linear(1, 1), Amp(dtype=None)
    assert products(Amp(dtype="bfloat16"), model, cpu) == "bfloat16"
    assert products(off, nn.Linear(1, 1, dtype=torch.bfloat16), cpu) == "bfloat16"
    tf32(False)
    assert products(off, model, cpu) == "float32"
    assert products(off, nn.Conv2d(1, 1, 1), cpu) == "tf32"  # which cuDNN rounds unless it is told not to
    tf32(True)
    assert products(off, model, cpu) == "tf32"


NEWER = """
import torch
from torch import nn
from ddp_train.amp import Amp
from ddp_train.training.record.throughput import products

torch.backends.cuda.matmul.fp32_precision = "tf32"  # after that, reading allow_tf32 raises
print(products(Amp(dtype=None), nn.Linear(1, 1), torch.device("cpu")))
torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = "ieee", "ieee"
print(products(Amp(dtype=None), nn.Conv2d(1, 1, 1), torch.device("cpu")))
"""


def test_what_the_newer_names_of_torch_have_set_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", NEWER], capture_output=True, text=True)  # torch cannot be set back
    assert done.stdout.split() == ["tf32", "float32"], done.stderr
