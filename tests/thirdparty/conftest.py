"""Parts of others without code of ours between: one command in a private folder, on two ranks, that must train. `make thirdparty`.

A test says which packages it needs (`@needs("timm")`), and is skipped where one is missing or cannot be imported, with the reason.
Every test of this folder has the marker `thirdparty`, so that `make test` leaves it out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

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
    """Skip a test where one of these packages cannot be imported."""
    return pytest.mark.needs(*packages)


@pytest.fixture(autouse=True)
def has_its_packages(request: pytest.FixtureRequest) -> None:
    """Skip the test of a package that is not here. Where nothing is to be run, nothing is looked for."""
    for mark in request.node.iter_markers("needs"):
        for name in mark.args:
            if why := why_missing(name):
                pytest.skip(f"{name} {why}")


@cache
def why_missing(package: str) -> str:
    """Return why a package cannot be used; "" when it can. A process of its own imports it: this one stays as it is."""
    if importlib.util.find_spec(package) is None:
        why = f"the package index has none that can be loaded beside torch {torch.__version__}, or it "
        return why * (package == "torchvision") + "is not installed: pip install 'ddp-train[thirdparty]'"
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"cannot be imported here: {done.stderr.strip().splitlines()[-1]}"


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
