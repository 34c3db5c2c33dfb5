"""The engine `ssh`: what each machine is told, and who holds a run."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from ddp_train.errors import ConfigErrors, EnvironmentRefuses
from ddp_train.launch.engine import ssh
from ddp_train.launch.engine.engine import Stage, Submission
from ddp_train.launch.engine.ssh import ENGINE, ssh_command
from ddp_train.launch.engine.ssh_remote import MARK
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.process import fork, start_of
from tests.unit.cli.runs import works_in
from tests.unit.launch.engine.specs import spec
from tests.unit.parts import checked

THREE = ("cluster=ssh", "cluster.device=cpu", "cluster.hosts=[a:2,b,user@c]", "cluster.processes_per_node=1")

GOLDEN = Path(__file__).parent / "golden/ssh_1.sh"


def test_each_machine_is_told_in_a_script_for_people_to_read() -> None:
    rendered = ENGINE.render([spec(Path("/shared/my run"), *THREE, "cluster.setup=['module load cuda']")])
    assert rendered.files[Path("/shared/my run/launch/ssh_1.sh")] == GOLDEN.read_text()
    assert [path.name for path in rendered.files] == ["ssh_0.sh", "ssh_1.sh", "ssh_2.sh"]
    assert list(rendered.commands) == [ssh_command(host) for host in ("a", "b", "user@c")]


def test_each_machine_has_its_own_processes() -> None:
    found = spec(Path("/run"), *THREE)
    assert (found.processes, found.min_nodes) == ((2, 1, 1), 3)
    assert found.job.config.batch.world_size == 4
    assert spec(Path("/run"), *THREE, "cluster.nodes='2:3'").min_nodes == 2


@pytest.mark.parametrize("name", ["it's", 'a "b"', "$(id)", "`id`", "back\\slash", "a\nb; id", "%s", "*", "#", "ü", "-n", "; exit 0"])
def test_paths_are_exact(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    (run / "launch").mkdir(parents=True)
    (run / "launch/here_w").touch()
    python = run / "python"
    python.write_text('#!/bin/sh\npwd; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    made = spec(run, *THREE, python=str(python))
    made = type(made)(**{**vars(made), "working_directory": str(run)})
    (script, *_) = ENGINE.render([made]).files.values()
    done = subprocess.run(["bash"], input=f"launch_id=w\n{script}", capture_output=True, text=True)
    assert done.stdout == f"{run}\n-m\nddp_train.launch.engine.ssh_remote\n{run}/launch/spec.json\n0\n", done.stderr


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("directory", "does not have the current folder; fix: cd to"),
        ("folder", "does not see the run folder, or cannot write to it; fix: cd to"),
        ("setup", "failed in a line of cluster.setup; fix: try these lines"),
        ("python", "does not have the Python of this command; fix: cluster.python=PATH"),
    ],
)
def test_a_machine_says_what_it_lacks(tmp_path: Path, missing: str, said: str) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    if missing != "folder":
        (run / "launch/here_w").touch()
    made = spec(run, *THREE, f"cluster.setup=['{'false' if missing == 'setup' else 'true'}']", python=str(tmp_path / "python"))
    made = type(made)(**{**vars(made), "working_directory": str(tmp_path / ("absent" if missing == "directory" else ""))})
    (script, *_) = ENGINE.render([made]).files.values()
    done = subprocess.run(["bash"], input=f"launch_id=w\n{script}", capture_output=True, text=True)
    assert done.returncode == 78 and done.stdout.startswith(f"{MARK}no {said}"), (done.stdout, done.stderr)
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("hosts", ["['-oProxyCommand=id']", "['a b']", "['a;id']", "[a,a:2]", "[a:0]", "a", "[]", "null", "['$(id)']"])
def test_what_is_no_list_of_machines_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigErrors, match=r"cluster\.hosts"):
        checked("cluster=ssh", "cluster.device=cpu", f"cluster.hosts={hosts}")


@pytest.mark.parametrize(
    ("override", "key"),
    [("cluster.nodes=2", "cluster.nodes"), ("cluster.wait=false", "cluster.wait"), ("cluster.launcher=local", "cluster.hosts")],
)
def test_what_does_not_fit_over_ssh_is_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigErrors, match=key):
        checked(*THREE, override)


def test_an_address_with_colons_is_a_machine() -> None:
    found = checked("cluster=ssh", "cluster.device=cpu", "cluster.hosts=['[fd00::1]:4','me@[fd00::2]',10.0.0.1:2]").cluster
    assert [host.name for host in found.hosts or ()] == ["fd00::1", "me@fd00::2", "10.0.0.1"]


def test_a_client_is_known_by_machine_number_and_start() -> None:
    client = fork(lambda: signal.pause() or 0)
    id = f"{socket.gethostname()}:{client.pid}:{start_of(client.pid)}"
    assert ENGINE.state(id).stage is Stage.RUNNING
    assert ENGINE.state(f"{id}0").stage is Stage.ENDED  # another process has its number by now
    ENGINE.stop(f"{id}0")
    assert client.exit_code() is None
    ENGINE.stop(id)
    assert client.wait() == -signal.SIGUSR1
    assert ENGINE.state(id).stage is Stage.ENDED
    with pytest.raises(EnvironmentRefuses, match="elsewhere"):
        ENGINE.stop(f"elsewhere:{os.getpid()}:1")


def test_a_run_that_has_ended_is_nobodys_on_any_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = RunFolder(tmp_path)
    made = spec(tmp_path, *THREE)
    run_folder.launch.mkdir()
    made.write()

    def client(*given: object, **options: object) -> int:
        found = Submission.read(run_folder)
        return 7 if found is not None and found.id.split(":")[1] == str(os.getpid()) else 1

    monkeypatch.setattr(ssh, "run_client", client)
    id = ENGINE.submit(ENGINE.render([made]))
    assert ENGINE.follow(run_folder, id) == 7 and Submission.read(run_folder) is None


def test_a_client_on_another_machine_is_judged_by_the_folder(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.launch.mkdir()
    assert Submission(engine="ssh", id="elsewhere:7:1").state(run_folder).stage is Stage.RUNNING  # it may be about to begin
    long_ago = Submission(engine="ssh", id="elsewhere:7:1", time=1.0)
    assert long_ago.state(run_folder).stage is Stage.ENDED
    with works_in(run_folder) as process:
        assert long_ago.state(run_folder).stage is Stage.RUNNING
        process.terminate()


def test_the_command_can_be_pasted() -> None:
    assert shlex.join(ssh_command("b")).endswith("-- b 'exec bash'")
