"""What is read from the source of ddp_train and torch is what importing would give, or it is imported."""

from __future__ import annotations

import ast
import collections
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train import CONF, FOLDER
from ddp_train.config.targets import locate, target
from ddp_train.traits import Constants, constants_of, needs_whole_matrices


def named() -> Iterator[str]:
    """Yield what our YAMLs name of ours and torch's, and every optimizer, schedule and layer of torch."""
    for file in sorted(CONF.rglob("*.yaml")):
        yield from (path for path in re.findall(r"_target_: *([\w.]+)", file.read_text()) if path.startswith(("ddp_train.", "torch.")))
    yield from (f"torch.optim.{name}" for name in torch.optim.__all__)
    yield from (f"torch.optim.lr_scheduler.{name}" for name in torch.optim.lr_scheduler.__all__)
    yield from (f"torch.nn.{name}" for name in dir(torch.nn) if name[0].isupper())


def facts(found: Any, path: str) -> tuple[Any, ...]:
    """Return all that the check asks of a target; types as it tells them apart."""
    arguments = [(each.name, each.kind, each.default) for each in inspect.signature(found).parameters.values()]
    hints = {name: sorted({*map(spelled, target.members_of(hint))}) for name, hint in target.hints_of(found).items() if name != "return"}
    return inspect.isclass(found), arguments, hints, target.follows_a_metric(found)


def spelled(member: Any) -> str:
    inner = target.typing.get_args(member) if target.typing.get_origin(member) is target.typing.Literal else ""
    return f"{getattr(target.typing.get_origin(member) or member, '__name__', member)}{inner}"


def needs_nothing(path: str) -> bool:
    """Tell whether the module of one of ours imports nothing that may be absent."""
    found = find_spec(path.rpartition(".")[0])
    assert found is not None and found.origin is not None
    return all(map(locate._cannot_fail, ast.parse(Path(found.origin).read_text()).body))


def test_what_is_read_is_what_importing_gives() -> None:
    paths = sorted(set(named()))
    read = {path: found for path in paths if (found := locate.stub_from_source(path)) is not None}
    assert {path: facts(found, path) for path, found in read.items()} == {path: facts(locate.locate(path), path) for path in read}
    assert len(read) > 40
    ours = [path for path in paths if path.startswith("ddp_train.") and not path.startswith("ddp_train.cli.")]
    assert {path for path in ours if needs_nothing(path)} <= set(read), "each costs torch's import: defaults of arguments are literals"
    assert {"torch.optim.AdamW", "torch.optim.SGD"} <= set(read)


@pytest.mark.parametrize(
    "path", ["torch.nn.Nothing", "torch.nothing.AdamW", "torch.device", "ddp_train", "torch.nn", "ddp_train.errors.DONE"]
)
def test_what_is_no_plain_class_or_function_is_imported(path: str) -> None:
    assert locate.stub_from_source(path) is None


def test_other_packages_are_imported_and_so_is_all_where_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = locate.stub_from_source("torch.optim.AdamW")
    assert locate.look_up("torch.optim.AdamW") is torch.optim.AdamW is not stub
    monkeypatch.delitem(locate.sys.modules, "torch")
    assert locate.look_up("torch.optim.AdamW") is stub
    assert locate.look_up("collections.OrderedDict") is collections.OrderedDict


SOURCES = {
    "decorated": "@wrapped\ndef Part(width: int = 3): ...",
    "made anew": "class Part:\n    def __new__(cls, width): ...",
    "of two": "class Part(A, B): ...",
    "given twice": "def Part(width): ...\ndef Part(height): ...",
    "sometimes": "if something:\n    def Part(width): ...",
    "a default of its own": "WIDTH = 3\ndef Part(width=WIDTH): ...",
    "an optional package": "import wandb\n\ndef Part(width): ...",
    "only where it is": "if not find(): raise ImportError\n\ndef Part(width): ...",
    "only for type checkers": "def Part(width: Nobody): ...",
    "of a metaclass": "class Part(metaclass=Meta):\n    def __init__(self, width): ...",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_is_not_plain_is_imported(source: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "FOLDER", tmp_path / FOLDER.name)
    (tmp_path / FOLDER.name).mkdir()
    (tmp_path / FOLDER.name / "parts.py").write_text(source)
    locate._module.cache_clear()
    locate.stub_from_source.cache_clear()
    assert locate.stub_from_source("ddp_train.parts.Part") is None
    locate._module.cache_clear()
    locate.stub_from_source.cache_clear()


def test_what_a_class_is_derived_from_is_read_as_importing_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = (
        "optimizer.adamw.AdamW",
        "optimizer.muon",
        "optimizer.several",
        "strategy.fsdp.FSDP",
        "strategy.zero1.Zero1",
        "strategy.power_sgd.PowerSGD",
        "objective.distillation.Distillation",
        "objective.segmentation.Segmentation",
        "callbacks.early_stopping.EarlyStopping",
        "data.mnist.FashionMNIST",
    )
    paths = [*(f"ddp_train.{path}" for path in ours), "torch.optim.Muon", "torch.optim.LBFGS"]
    real = [locate.class_of(path) for path in paths]
    monkeypatch.delitem(sys.modules, "torch")
    for path, kind in zip(paths, real, strict=True):
        read = locate.class_of(path)
        assert read is not kind or path.startswith("torch."), f"{path} costs torch's import"
        assert needs_whole_matrices(read) == needs_whole_matrices(kind)
        for declared in Constants.__subclasses__():
            assert vars(constants_of(read, declared)) == vars(constants_of(kind, declared))
        assert [each.__qualname__ for each in read.__mro__ if each.__module__.startswith("ddp_train")] == [
            each.__qualname__ for each in kind.__mro__ if each.__module__.startswith("ddp_train")
        ]
    assert [needs_whole_matrices(locate.class_of(path)) for path in paths] == [False, True, *[False] * 8, True, True]
    monkeypatch.undo()
