"""Which device has which peak, and in which type a model multiplies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ddp_train.amp import Amp
from ddp_train.strategy.fsdp import FSDP
from ddp_train.training.record.device_peak import lookup, peak_of, products


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
    assert products(Amp(dtype=None), model, cpu, cast=in_half.computes_in(2)) == "bfloat16"
    assert products(Amp(dtype=None), model, cpu, cast=in_half.computes_in(1)) == "float32", "one rank alone trains the plain model"
    assert products(Amp(dtype=None), model, cpu, cast=plain.computes_in(2)) == "float32"
    assert products(Amp(dtype="float16"), model, cpu, cast=in_half.computes_in(2)) == "float16"


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
from ddp_train.training.record.device_peak import products

torch.backends.cuda.matmul.fp32_precision = "tf32"  # after that, reading allow_tf32 raises
print(products(Amp(dtype=None), nn.Linear(1, 1), torch.device("cpu")))
torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = "ieee", "ieee"
print(products(Amp(dtype=None), nn.Conv2d(1, 1, 1), torch.device("cpu")))
"""


def test_what_the_newer_names_of_torch_have_set_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", NEWER], capture_output=True, text=True)  # torch cannot be set back
    assert done.stdout.split() == ["tf32", "float32"], done.stderr
