"""Parts of others without code of ours between: one command in a private folder, on two ranks, that must train. `make thirdparty`.

A test says which packages it needs (`@needs("timm")`), and is skipped where one is missing; nothing is imported to find that out.
Every test of this folder has the marker `thirdparty`, so that `make test` leaves it out.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Project, metrics

FOLDER = Path(__file__).parent
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}  # nothing is fetched, nothing is sent
_LIMIT_S = 600  # a first import of some packages takes a minute where the machine is busy


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, before pytest chooses by marker."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.thirdparty)
            item.add_marker(pytest.mark.filterwarnings("default"))  # packages of others warn as they like


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where one of these packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install 'ddp-train[thirdparty]'")


@pytest.fixture
def train(project: Project) -> Callable[..., Path]:
    """Give what types `ddp-train ARGUMENTS` in the project's folder, and returns the run folder when the run has trained to its end."""

    def run(*arguments: str) -> Path:
        before = set(project.runs())
        done = project.run("cluster=cpu", "cluster.processes_per_node=2", *arguments, env={**os.environ, **_OFFLINE}, timeout=_LIMIT_S)
        assert done.returncode == 0, done.output
        (folder,) = set(project.runs()) - before
        assert metrics(folder, "train"), done.output
        return folder

    return run
