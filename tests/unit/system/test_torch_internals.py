"""What of torch is replaced or private stands in one table, and this torch has it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train import FOLDER
from ddp_train.system import torch_internals
from ddp_train.system.torch_internals import INTERNALS, missing

_OF_OTHERS = {
    *("_current_frames", "_exit", "_replace", "_asdict", "_target_", "_trial_id", "_get_full_key", "_get_file_writer"),
    *("_computed", "_defaults", "_reductions"),  # of torchmetrics
    *("_buffers", "_parameters", "_metadata", "_version"),  # of torch, and of old
    *("_set_default_timeout", "_timeout"),  # of a backend: with `ProcessGroup._get_backend`
}
"""Private attributes that the table need not have."""


def _uses(file: Path) -> Iterator[str]:
    """Yield the private names of torch that a module imports or reaches through what it imports."""
    tree = ast.parse(file.read_text())
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                each.asname or each.name.partition(".")[0]: each.name if each.asname else "torch"
                for each in node.names
                if _is_torch(each.name)
            }
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"
                if _is_private(known[each.asname or each.name]):
                    yield known[each.asname or each.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (found := _dotted(node, known)) and _is_private(found):
            yield found


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value, known)):
        return f"{before}.{node.attr}"
    return ""


def _plain(name: str) -> str:
    """Return a name as the table has it: from the module that defines it, without what follows."""
    return next((known for known in INTERNALS if name == known or name.startswith(f"{known}.")), name)


def test_every_private_name_of_torch_stands_in_the_table() -> None:
    found = {_plain(name): file for file in FOLDER.rglob("*.py") for name in _uses(file)}
    modules = {".".join(name.split(".")[:count]) for name in INTERNALS for count in range(1, name.count(".") + 1)}
    assert {name: str(file) for name, file in found.items() if name not in INTERNALS and name not in modules} == {}


def test_every_private_attribute_of_a_foreign_object_is_known() -> None:
    trees = {file: ast.parse(text) for file in FOLDER.rglob("*.py") if "torch" in (text := file.read_text())}
    own = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    known = {part for name in INTERNALS for part in name.split(".")} | own | _OF_OTHERS
    used = {
        f"{file.relative_to(FOLDER)}: {ast.unparse(node)}": node.attr
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node.value) != "self"
    }
    assert [place for place, name in used.items() if name not in known] == []


def test_what_a_constructor_sets_is_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent

    name = f"{local_elastic_agent.__name__}.LocalElasticAgent._pcontext"
    assert missing([name]) == []
    monkeypatch.setattr(local_elastic_agent.LocalElasticAgent, "__init__", lambda agent: None)
    assert len(missing([name])) == 1


def test_this_torch_has_all_of_it() -> None:
    for name in INTERNALS:
        parts = name.split(".")
        for count in range(len(parts) - 1, 0, -1):
            with suppress(ModuleNotFoundError):
                importlib.import_module(".".join(parts[:count]))
                break
    assert missing() == []


def test_what_is_missing_is_said_with_what_is_done_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    (line,) = missing()
    assert line.startswith(f"torch {torch.__version__} has no torch.autograd.graph._engine_run_backward; instead: loss.backward()")


def test_a_module_that_is_not_imported_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    server = "torch.distributed.elastic.agent.server.local_elastic_agent"
    for module in ("torch.distributed.launcher.api", server, server.rpartition(".")[0]):  # a rank under a user's torchrun has imported none
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert missing(["torch.distributed.launcher.api.LocalElasticAgent", f"{server}.LocalElasticAgent._start_workers"]) == []


@pytest.mark.parametrize(
    ("version", "is_newer"), [("2.13.0+cpu", False), ("2.15.3", False), ("2.16.0.dev20261101", True), ("3.0.0", True), ("2.9.1", False)]
)
def test_a_torch_that_is_newer_than_what_passed_is_named(monkeypatch: pytest.MonkeyPatch, version: str, is_newer: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_internals.newer_than_passed().startswith(f"{version} is newer than 2.15") is is_newer


def test_gradients_are_the_same_without_the_private_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_train.training.loop import train_step

    def found() -> Any:
        weight = torch.tensor([2.0, 3.0], requires_grad=True)
        train_step.backward((weight * weight).sum(), torch.tensor(0.5))
        return weight.grad

    with_it = found()
    monkeypatch.setattr(train_step, "_engine_run_backward", None)
    assert torch.equal(found(), with_it)
