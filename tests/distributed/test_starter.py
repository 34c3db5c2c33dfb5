"""A new user's first five minutes, from the wheel in a clean environment: init, train, a sweep, pytest, export, two lines of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from ddp_train import FOLDER

pytestmark = [pytest.mark.distributed, pytest.mark.long]

_WITHIN_S = 300


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Build the wheel, install it into a new environment beside this one's packages, and return the folder of its commands."""
    for package in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(package, reason="needs what builds the wheel: make train installs it")
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    run([sys.executable, "-c", build, str(tmp_path)], FOLDER.parent)
    (wheel,) = tmp_path.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    packages = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    own = packages / "own"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={own}", str(wheel)], tmp_path)
    # The wheel's folder comes first; of the other environment only what is listed there, so not its link to this checkout.
    (packages / "these.pth").write_text(f"{own}\n{sysconfig.get_path('purelib')}\n")
    commands = tmp_path / "venv/bin"
    for name, module in {"ddp-train": "ddp_train", "pytest": "pytest"}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {commands}/python -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    return commands


def run(words: list[str], folder: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env={**kept, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_starter_project_trains_sweeps_passes_its_tests_and_gives_its_weights_away(environment: Path, tmp_path: Path) -> None:
    ddp_train, pytest_command, python = (str(environment / name) for name in ("ddp-train", "pytest", "python"))
    started = time.monotonic()
    run([ddp_train, "init", "shapes"], tmp_path)
    shapes = tmp_path / "shapes"
    where = run([python, "-c", "import ddp_train; print(ddp_train.__file__)"], shapes)
    assert where.startswith(str(environment.parent)), where

    said = run([ddp_train, "cluster=cpu"], shapes)
    assert "Done: 128 steps" in said and "eval/worst_class" in said
    (folder,) = (shapes / "outputs/shapes").iterdir()
    said = run([ddp_train, "-m", "model.width=4,8", "trainer.max_epochs=1", "cluster=cpu"], shapes)
    assert "job 0  completed" in said and "job 1  completed" in said
    said = run([pytest_command, "-q"], shapes)
    assert "4 passed" in said

    run([ddp_train, "export", str(folder)], shapes)
    code = f"""
from shapes.model import WaveNet
import safetensors.torch
WaveNet(3).load_state_dict(safetensors.torch.load_file({str(folder / "export/model.safetensors")!r}))
"""
    run([python, "-c", code], shapes)
    assert time.monotonic() - started < _WITHIN_S
