"""`deterministic=true` on a GPU ends at an operation without a deterministic kernel. Here such operations are found without one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_train.interfaces.objective import evaluate_batch, loss_sum
from tests.unit.rig.cases import NAMES, case, files

FROZEN_AT = "2.13"
"""The torch whose page of `use_deterministic_algorithms` the table follows."""

THROWS: dict[str, str] = {
    "torch.nn.AvgPool3d": r"avg_pool3d_backward",
    "torch.nn.AdaptiveAvgPool2d": r"_adaptive_avg_pool2d_backward",
    "torch.nn.AdaptiveAvgPool3d": r"_adaptive_avg_pool3d_backward",
    "torch.nn.AdaptiveMaxPool2d": r"adaptive_max_pool2d_backward",
    "torch.nn.FractionalMaxPool2d": r"fractional_max_pool2d_backward",
    "torch.nn.FractionalMaxPool3d": r"fractional_max_pool3d_backward",
    "torch.nn.MaxUnpool1d": r"max_unpool2d",  # by the one of two dimensions
    "torch.nn.MaxUnpool2d": r"max_unpool2d",
    "torch.nn.MaxUnpool3d": r"max_unpool3d",
    # Bilinear in two dimensions is computed otherwise where torch must be deterministic: a test below looks whether that is still so.
    "torch.nn.functional.interpolate": r"upsample_(linear1d|bicubic2d|trilinear3d)_backward|_upsample_bi\w+2d_aa_backward",
    "torch.nn.ReflectionPad1d": r"reflection_pad1d_backward",
    "torch.nn.ReflectionPad2d": r"reflection_pad2d_backward",
    "torch.nn.ReflectionPad3d": r"reflection_pad3d_backward",
    "torch.nn.NLLLoss": r"nll_loss2d_(forward|backward)",  # of [B, K, H, W]; that of [B, K] is deterministic
    "torch.nn.CTCLoss": r"_(cudnn_)?ctc_loss_backward",
    "torch.nn.EmbeddingBag": r"_embedding_bag_(dense_)?backward",
    "torch.Tensor.put_": r"put_?",
    "torch.histc": r"histc",
    "torch.bincount": r"bincount",
    "torch.median": r"(nan)?median",
    "torch.nn.functional.grid_sample": r"grid_sampler_[23]d_backward",
    "torch.cumsum": r"cumsum_?",  # of floats; of integers it is exact
    "torch.Tensor.scatter_reduce": r"scatter_reduce_?",  # prod
    "torch.Tensor.resize_": r"resize_",  # of quantised tensors
}
"""What torch's page says to raise an error on CUDA tensors, and the operations that do."""
NOT_ON_ITS_PAGE = {"max_pool2d": r"max_pool2d_with_indices_backward", "kthvalue": r"kthvalue"}
"""Raise one too, though the page does not name them."""

_ALL = re.compile("|".join({*THROWS.values(), *NOT_ON_ITS_PAGE.values()}))
_FLOATS_ALONE = {"cumsum", "cumsum_"}
_WITH = {"bincount": "weights", "scatter_reduce": "prod", "scatter_reduce_": "prod", "median": "dim", "nanmedian": "dim"}
"""Operations that raise one with this alone: an argument that is given, an overload or a way to reduce."""
_QUANTISED_ALONE = {"resize_"}


class FailsWithoutAKernel(TorchDispatchMode):
    """Fails where CUDA has no deterministic kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if _ALL.fullmatch(name) and self._raises(name, func, args, kwargs or {}):
            raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA")
        return func(*args, **(kwargs or {}))

    def _raises(self, name: str, func: Any, args: Any, kwargs: Any) -> bool:
        if name in _FLOATS_ALONE:
            return bool(args[0].is_floating_point())
        if name in _QUANTISED_ALONE:
            return bool(args[0].is_quantized)
        if name in _WITH:
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            return given.get(_WITH[name]) is not None or _WITH[name] in given.values() or _WITH[name] in func._overloadname
        return True


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_table_is_that_of_torchs_own_page() -> None:
    page = inspect.getdoc(torch.use_deterministic_algorithms) or ""
    throws = page.split("operations will throw a")[1].split("In addition")[0]
    items = re.split(r"(?m)^\s*\* (?=:)", throws)[1:]
    named = {text.split("`")[1] for text in items if "CUDA" in text or "MPS" not in text}  # since 2.15 it has Apple's, too
    new, gone = named - THROWS.keys(), THROWS.keys() - named
    assert not new or torch.__version__ < FROZEN_AT, f"torch {torch.__version__} names {new}, which the table of {FROZEN_AT} has not"
    assert not gone or not torch.__version__.startswith(FROZEN_AT), f"torch {torch.__version__} names no more: {gone}"


def test_bilinear_resizing_is_still_computed_otherwise_on_a_gpu() -> None:
    written = inspect.getsource(F.interpolate)
    assert re.search(r'mode == "bilinear".*?are_deterministic_algorithms_enabled\(\).*?_upsample_linear_vec', written, re.DOTALL)


BAD = {
    "nll_loss2d_forward": lambda: F.cross_entropy(torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)),
    "_adaptive_avg_pool2d_backward": lambda: nn.AdaptiveAvgPool2d(2)(_wanted(1, 2, 6, 6)).sum().backward(),
    "max_pool2d_with_indices_backward": lambda: F.max_pool2d(_wanted(1, 2, 6, 6), 2).sum().backward(),
    "reflection_pad2d_backward": lambda: F.pad(_wanted(1, 2, 6, 6), (1, 1, 1, 1), mode="reflect").sum().backward(),
    "upsample_bicubic2d_backward": lambda: F.interpolate(_wanted(1, 2, 6, 6), size=9, mode="bicubic").sum().backward(),
    "cumsum": lambda: torch.randn(4).cumsum(0),
    "median": lambda: torch.randn(4).median(0),
    "bincount": lambda: torch.bincount(torch.tensor([1]), weights=torch.ones(1)),
    "histc": lambda: torch.histc(torch.randn(4)),
    "scatter_reduce": lambda: torch.ones(3).scatter_reduce(0, torch.tensor([0, 0]), torch.ones(2), "prod"),
}
"""What must be found."""


def _wanted(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_kernel_is_found(name: str) -> None:
    with FailsWithoutAKernel(), pytest.raises(RuntimeError, match=rf"^{name} does not have a deterministic"):
        BAD[name]()


def test_what_has_one_passes() -> None:
    with FailsWithoutAKernel():
        torch.ones(3, dtype=torch.long).cumsum(0)
        torch.bincount(torch.tensor([1, 2]))
        torch.randn(5).median()
        F.cross_entropy(_wanted(2, 3), torch.zeros(2, dtype=torch.long)).backward()
        torch.ones(3).scatter_reduce(0, torch.tensor([0, 0]), torch.ones(2), "sum")


def test_each_model_and_objective_of_conf_is_in_a_case() -> None:
    parts = [name.split(", ") for name in NAMES]
    assert {made for made, _ in parts} == files("model")
    assert {wanted.split(" ")[0] for _, wanted in parts} == files("objective")


@pytest.mark.parametrize("name", NAMES)
def test_models_and_objectives_need_no_kernel_that_is_not_there(name: str) -> None:
    """Forward, backward and what evaluation does."""
    model, objective, batch = case(name)
    with FailsWithoutAKernel():
        loss_sum(objective, model, batch).total.backward()
        with torch.no_grad():
            evaluate_batch(objective, model.eval(), batch)
