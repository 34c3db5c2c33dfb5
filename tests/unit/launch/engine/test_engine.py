"""What an engine gives back is written whole, and is found by the run folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError, DataError
from ddp_train.launch.engine.engine import Engine, Rendered, Stage, State, Submission, setup_lines
from ddp_train.launch.engine.slurm_script import task_script
from ddp_train.launch.engine.ssh import ENGINE
from ddp_train.launch.engine.ssh_remote import MARK
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from tests.unit.launch.engine.specs import spec

SSH = ("cluster=ssh", "cluster.device=cpu", "cluster.hosts=[a]", "cluster.processes_per_node=1")


def test_the_files_are_written_with_their_folders(tmp_path: Path) -> None:
    files = {tmp_path / "launch/a.sh": "echo a\n", tmp_path / "b": ""}
    Rendered(files=files, commands=[["sbatch", "a.sh"]], run_folders=[tmp_path]).write()
    assert {path: path.read_text() for path in files} == files


def test_an_engine_that_lacks_a_method_is_not_made() -> None:
    class Half(Engine):
        def state(self, id: str) -> State:
            return State(stage=Stage.ENDED)

    with pytest.raises(TypeError, match=r"abstract methods .*follow.*submit"):
        Half()  # type: ignore[abstract]


def test_a_run_knows_who_has_it(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    assert Submission.read(run_folder) is None
    submission = Submission(engine="slurm", id="17_3")
    submission.write(run_folder)
    assert Submission.read(run_folder) == submission


@pytest.mark.parametrize(("engine", "id"), [("slurm", "--me"), ("slurm", ""), ("..slurm", "17"), ("ssh", "a b")])
def test_an_id_that_is_no_name_is_refused(tmp_path: Path, engine: str, id: str) -> None:
    Submission(engine=engine, id=id).write(run_folder := RunFolder(tmp_path))
    with pytest.raises(DataError, match="an engine, and its id"):
        Submission.read(run_folder)


@pytest.mark.parametrize(("line", "fails"), [("false || true", False), ("false; true", False), ("true; false", True), ("false", True)])
def test_its_last_status_counts_over_ssh_and_on_slurm(tmp_path: Path, line: str, fails: bool) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/here_w").touch()
    for overrides in (SSH, ()):
        made = spec(tmp_path, *overrides, f"cluster.setup=['{line}']", python="/bin/true")
        made = Spec(**{**vars(made), "working_directory": str(tmp_path)})
        script = f"launch_id=w\n{next(iter(ENGINE.render([made]).files.values()))}" if overrides else task_script(made)
        done = subprocess.run(["bash"], input=script, capture_output=True, text=True)
        assert done.returncode == (78 if fails else 0), done.stderr
        assert (f"cluster.setup failed: {line}" in done.stderr) == fails
        assert not overrides or done.stdout == (
            f"{MARK}no failed in a line of cluster.setup; fix: try these lines with ssh HOST bash\n" if fails else ""
        )


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
    with pytest.raises(ConfigError, match="contains a line break"):
        list(setup_lines(["true\nfalse"], refuse="no"))
