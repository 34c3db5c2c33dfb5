"""What is said once in the house is said in one place, and every module that a text names is there."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_train import FOLDER
from ddp_train.system import torchrun_env

ROOT = FOLDER.parent
TORCHRUN = "|".join((*torchrun_env.VARIABLES, "GROUP_WORLD_SIZE", r"TORCHELASTIC_\w+"))


def texts(file: Path, *, with_docstrings: bool) -> Iterator[str]:
    """Yield the texts in a source file."""
    tree = ast.parse(file.read_text())
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings, of constants too
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (with_docstrings or node not in statements):
            yield node.value


def sources() -> list[Path]:
    return sorted([*FOLDER.rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")])


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        # What /proc says of the network, the driver and the mounts is read where these are.
        ("/proc/(?!net/|driver/|self/mountinfo)|^/proc$", {"system/process.py"}),
        # MASTER_ADDR is also what a cluster tells an agent: where the machines meet.
        (rf"^({TORCHRUN})$", {"system/torchrun_env.py", "config/cluster.py"}),
        ("^DDP_TRAIN_", {"system/handover.py"}),
    ],
)
def test_what_the_system_says_is_read_in_one_place(pattern: str, places: set[str]) -> None:
    found = {
        str(file.relative_to(FOLDER))
        for file in FOLDER.rglob("*.py")
        if any(re.search(pattern, text) for text in texts(file, with_docstrings=False))
    }
    assert found == places


def test_modules_that_are_named_in_texts_exist() -> None:
    for file in sources():
        for text in texts(file, with_docstrings=True):
            for path in re.findall(r"(?<![\w/])ddp_train/[\w/]+\.py", text):
                assert (ROOT / path).exists(), f"{file}: {path}"
            for name in re.findall(r"(?<![\w./])ddp_train\.[a-z_]+(?:\.[a-z_]+)*\b(?!\.py)", text):
                assert importlib.util.find_spec(name), f"{file}: {name}"


def test_the_config_is_read_by_its_types() -> None:
    """`config.trainer.max_steps`, so that a key that is renamed is missed by the type checker."""
    for file in FOLDER.rglob("*.py"):
        if file.parent.name != "config":
            assert re.findall(r"""\.tree\[|\btree\[["']""", file.read_text()) == [], file
