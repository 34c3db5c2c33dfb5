"""A line of cluster.setup fails in one way, whichever engine runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.launch.engine.setup_lines import setup_lines
from ddp_train.launch.engine.slurm_script import task_script
from ddp_train.launch.engine.ssh import ENGINE
from ddp_train.launch.engine.ssh_remote import MARK
from ddp_train.launch.spec import Spec
from tests.unit.launch.engine.specs import spec

SSH = ("cluster=ssh", "cluster.device=cpu", "cluster.hosts=[a]", "cluster.processes_per_node=1")


@pytest.mark.parametrize(("line", "fails"), [("false || true", False), ("false; true", False), ("true; false", True), ("false", True)])
def test_its_last_status_counts_over_ssh_and_on_slurm(tmp_path: Path, line: str, fails: bool) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/here_w").touch()
    for overrides in (SSH, ()):
        made = spec(tmp_path, *overrides, f"cluster.setup=['{line}']", python="/bin/true")
        made = Spec(**{**vars(made), "working_directory": str(tmp_path)})
        script = f"word=w\n{next(iter(ENGINE.render([made]).files.values()))}" if overrides else task_script(made)
        done = subprocess.run(["bash"], input=script, capture_output=True, text=True)
        assert done.returncode == (78 if fails else 0), done.stderr
        assert (f"cluster.setup failed: {line}" in done.stderr) == fails
        assert not overrides or done.stdout == (f"{MARK}no setup\n" if fails else "")


def test_a_line_is_named_exactly() -> None:
    script = "\n".join(['no() { printf %s "$1"; exit 3; }', *setup_lines(["true", "false # it's $HOME"], refuse="no")])
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "cluster.setup failed: false # it's $HOME")


@pytest.mark.parametrize("overrides", [SSH, ()])
def test_a_secret_is_a_variable_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    made = spec(tmp_path, *overrides, "cluster.setup=['export WANDB_API_KEY=${oc.env:HF_TOKEN}']")
    script = next(iter(ENGINE.render([made]).files.values())) if overrides else task_script(made)
    assert "\nexport WANDB_API_KEY=${HF_TOKEN}\n" in script and "hf_0123456789" not in script


def test_a_line_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a line end"):
        list(setup_lines(["true\nfalse"], refuse="no"))
