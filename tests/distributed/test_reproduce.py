"""A run from a dirty tree is had again after the tree was changed back, here and from a bundle elsewhere: the same losses, to the bit."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ddp_train import CONF, FOLDER
from ddp_train.system.files import json_lines
from tests.conftest import TINY, Project

pytestmark = pytest.mark.distributed

SECRET, FROM_ENVIRONMENT = "-".join(("planted", "literal", "7f3")), "-".join(("planted", "environment", "91c"))
# Not as they are: a bundle has the code of a ddp_train that is a checkout, and so this file.
COMMITTED = "from ddp_train.model.mlp import MLP\n\nclass Model(MLP):\n    pass\n"
CHANGED = """from ddp_train.model.mlp import MLP
from extra import SCALE

class Model(MLP):
    def forward(self, x):
        return super().forward(x) * SCALE
"""
RUN = [*TINY, "model._target_=parts.Model", "trainer.max_steps=8", "trainer.log_every_steps=2", "evaluation.every_steps=4", "cluster=cpu"]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def dirty(project: Project) -> None:
    """Make the project a repository with changes that no commit has."""
    project.write("parts.py", COMMITTED)
    project.write("gone.py", "x = 1\n")
    project.write(".gitignore", "outputs\nfake\n")
    git(project.folder, "init", "-q")
    git(project.folder, "add", "-A")
    git(project.folder, "commit", "-qm", "first")
    project.write("parts.py", CHANGED)
    project.write("extra.py", f"SCALE = 3\napi_key = '{SECRET}'\nother = '{FROM_ENVIRONMENT}'\n")
    (project.folder / "gone.py").unlink()


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in json_lines(run / "metrics.jsonl")]


def all_bytes(bundle: bytes) -> bytes:
    """Return the names and the content of everything in a bundle, of the archive in it too."""
    found = b""
    with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member).read() if member.isreg() else member.linkname.encode()  # type: ignore[union-attr]
            found += b"\0" + member.name.encode() + b"\0" + (all_bytes(content) if member.name.endswith(".tar.gz") else content)
    return found


def test_a_run_from_a_dirty_tree_gives_the_same_losses_here_and_from_a_bundle_elsewhere(project: Project, tmp_path: Path) -> None:
    dirty(project)
    env = {"PLANTED_TOKEN": FROM_ENVIRONMENT}
    done = project.run(*RUN, env=env, timeout=900)
    assert done.returncode == 0, done.output
    run = project.the_run()
    git(project.folder, "checkout", "-q", ".")
    git(project.folder, "clean", "-fdq")

    fake = tmp_path / "fake" / "numpy-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n\n")
    checked = project.run("reproduce", str(run), "--check", env={"PYTHONPATH": str(fake.parent)})
    numpy = json.loads((run / "environment.json").read_text())["packages"]["numpy"]
    assert checked.returncode == 1 and f"package numpy: {numpy} -> 9.9.9" in checked.output
    assert "extra.py: *** in place of a secret, line 2, 3" in checked.output
    assert project.runs() == [run]

    again = project.run("reproduce", str(run), timeout=900)
    assert again.returncode == 0 and "the same losses bit for bit: 6 records up to step 8" in again.output, again.output
    new = next(folder for folder in project.runs() if folder != run)
    assert losses(new) == losses(run)
    restored = new / "launch" / "restored" / project.folder.name
    assert (restored / "parts.py").read_text() == CHANGED and not (restored / "gone.py").exists()
    assert git(project.folder, "status", "--porcelain") == "" and (project.folder / "parts.py").read_text() == COMMITTED

    exported = project.run("reproduce", str(run), "--export=run.tar.gz")
    assert exported.returncode == 0, exported.output
    bundle = (project.folder / "run.tar.gz").read_bytes()
    content = all_bytes(bundle)
    assert SECRET.encode() not in content and FROM_ENVIRONMENT.encode() not in content and b"SCALE = 3" in content
    assert not re.search(rb"\0[\w./-]*step_\d{8}", content) and b'"host": "' + os.uname().nodename.encode() not in content

    checkout = tmp_path / "checkout"
    shutil.copytree(FOLDER, checkout / FOLDER.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CONF, checkout / "conf")
    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.folder.mkdir()
    (elsewhere.folder / "run.tar.gz").write_bytes(bundle)
    shutil.rmtree(run.parent)
    (project.folder / ".git").rename(project.folder / "no_git")
    refused = elsewhere.run("reproduce", "run.tar.gz", env={"PYTHONPATH": str(checkout)}, timeout=900)
    assert refused.returncode == 2 and "model._target_: parts.Model" in refused.output and not (elsewhere.folder / "outputs").exists()
    trained = elsewhere.run("reproduce", "run.tar.gz", "--trust", env={"PYTHONPATH": str(checkout)}, timeout=900)
    assert trained.returncode == 0 and "the same losses bit for bit: 6 records up to step 8" in trained.output, trained.output


def test_a_run_that_was_killed_is_reproduced_as_an_unbroken_one(project: Project) -> None:
    project.write("parts.py", COMMITTED)  # no repository: all *.py are kept
    project.write("values/weights.txt", "1\n")
    faults = ["debug=faults", "debug.faults=[{kind:kill,rank:1,step:6}]", "checkpoint.every_steps=4", "cluster.max_restarts=1"]
    done = project.run(*RUN, *faults, timeout=900)
    assert done.returncode == 0, done.output
    run = project.the_run()
    (project.folder / "parts.py").unlink()
    again = project.run("reproduce", str(run), timeout=900)
    assert again.returncode == 0 and "the same losses bit for bit" in again.output and "debug.faults=[]" in again.output, again.output
    lines = (run / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    lines[1] = json.dumps({**record, "loss": record["loss"] * 1.5})
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    other = project.run("reproduce", str(run), "debug.max_steps=4", timeout=900)
    assert other.returncode == 1 and f"the losses differ from step {record['step']} on" in other.output, other.output
