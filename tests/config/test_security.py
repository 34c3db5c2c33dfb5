"""What a configuration must not do: leave its place, carry a secret, grow without end, or call tools. All of it before anything starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddp_train import redaction
from tests.config.test_config import command_line


def written(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["name=../../x"], "name: is '../../x'"),
        (["name='a\nb'"], r"name: is 'a\nb'"),
        (["hydra.run.dir=outputs/${oc.env:PLACE}/x"], "a name does not choose the folder"),
        (["hydra.output_subdir=../../x"], "hydra.output_subdir"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=../../x/${hydra.job.num}"], "hydra.sweep.subdir: leads to"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=/elsewhere/${hydra.job.num}"], "hydra.sweep.subdir: leads to"),
    ],
)
def test_names_stay_below_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    monkeypatch.setenv("PLACE", "../../..")
    (tmp_path / "a" / "b").mkdir(parents=True)
    code, jobs = command_line(monkeypatch, tmp_path / "a" / "b", *overrides)
    assert (code, jobs) == (2, [])
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.yaml"))


def test_a_link_below_outputs_is_not_followed_and_a_typed_folder_is_the_users_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "outputs").symlink_to("scratch")  # the user's own
    (tmp_path / "outputs" / "linked").symlink_to(tmp_path / "elsewhere")
    assert command_line(monkeypatch, tmp_path, "name=linked")[0] == 2
    assert "outputs/linked is a link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())
    code, jobs = command_line(monkeypatch, tmp_path, f"hydra.run.dir={tmp_path}/elsewhere/mine")
    assert (code, jobs[0].run_folder.root) == (0, tmp_path / "elsewhere" / "mine")
    assert command_line(monkeypatch, tmp_path)[0] == 0


def test_what_others_can_write_is_not_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "outputs" / "run"
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=outputs/run")[0] == 0
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    for path, said in (
        (run, "everybody can write"),
        (run / "config.yaml", "everybody can write"),
        (run / "checkpoints" / "step_00000001", "every"),
    ):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert command_line(monkeypatch, tmp_path, "resume", "outputs/run")[0] == 2
        assert said in capsys.readouterr().err
        assert command_line(monkeypatch, tmp_path, "hydra.run.dir=outputs/run")[0] == 2
        capsys.readouterr()
        path.chmod(mode)
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "config.yaml")
    assert command_line(monkeypatch, tmp_path, "resume", "outputs/run")[0] == 2
    assert "is a link" in capsys.readouterr().err
    if os.getuid() == 0:
        (run / "config.yaml").unlink()
        (tmp_path / "config.yaml").rename(run / "config.yaml")
        os.chown(run / "config.yaml", 12345, -1)
        assert command_line(monkeypatch, tmp_path, "resume", "outputs/run")[0] == 2
        assert "belongs to another user (uid 12345)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "variable"),
    [
        (["+logger.api_key=abcdefgh12"], "API_KEY"),
        (["++model.note=x-tops3cret-value"], "PLANTED_TOKEN"),
        (["+data.url=https://me:hunter22@host/x"], "URL_PASSWORD"),
        (["+cluster.env.WANDB_API_KEY=abcdefgh12"], "WANDB_API_KEY"),
        (["-m", "seed=1,2", "+logger={api_key: abcdefgh12}"], "API_KEY"),
        (["resume", "outputs/none", "logger.api_key=abcdefgh12"], "API_KEY"),
        (["+extra.api_key =abcdefgh12"], "API_KEY"),
        (["+extra.api_key", "=abcdefgh12"], "API_KEY"),  # which the shell has cut
        (["+extra.api_key=", "abcdefgh12"], "API_KEY"),
        (["--logger.api_key=abcdefgh12"], "API_KEY"),
    ],
)
def test_a_secret_that_is_spelled_out_is_refused_without_being_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], variable: str
) -> None:
    monkeypatch.setattr(redaction, "_seen", {})
    monkeypatch.setattr(redaction, "_scanned", {})
    monkeypatch.setenv("PLANTED_TOKEN", "tops3cret-value")
    code, jobs = command_line(monkeypatch, tmp_path, *overrides)
    said = capsys.readouterr()
    assert (code, jobs) == (2, [])
    assert f"${{oc.env:{variable}}}" in said.err
    assert not any(secret in said.out + said.err + written(tmp_path) for secret in ("abcdefgh12", "tops3cret", "hunter22"))


class Writer:
    def __init__(self, api_key: str = "", port: int = 0) -> None: ...


@pytest.mark.parametrize("wrong", ["apikey: abcdefgh12", "api_kye: abcdefgh12", "port: {api_key: abcdefgh12}"])
def test_what_a_yaml_spells_out_is_not_repeated_by_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    own = f"metrics:\n  mine:\n    _target_: {__name__}.Writer\n    {wrong}\n"
    (tmp_path / "mine/experiment/own.yaml").write_text(f"# @package _global_\n{own}")
    assert command_line(monkeypatch, tmp_path, "--config-dir=mine", "experiment=own") == (2, [])
    said = capsys.readouterr()
    assert "${oc.env:" in said.err
    assert "abcdefgh12" not in said.out + said.err


@pytest.mark.parametrize(
    "words",
    [
        ["hydra.run.dir=outputs/${oc.env:MY_TOKEN}"],
        ["plan", "hydra.run.dir=outputs/${oc.env:MY_TOKEN}"],
        ["plan", "-m", "seed=1,2", "hydra.sweep.dir=outputs/${oc.env:MY_TOKEN}"],
        ["plan", "-m", "seed=1,2", "hydra.sweep.subdir=${hydra.job.num}_${oc.env:MY_TOKEN}"],
    ],
)
def test_a_secret_names_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-word-to-hide")
    assert command_line(monkeypatch, tmp_path, *words, "cluster=cpu", "model=mlp", "data.num_samples=64") == (2, [])
    shown = "".join(capsys.readouterr())
    assert ".dir: holds the secret MY_TOKEN" in shown or ".subdir: holds the secret MY_TOKEN" in shown
    assert "a-word-to-hide" not in shown and not [*tmp_path.rglob("*a-word-to-hide*")]


def test_a_reference_to_a_secret_stays_one_and_the_hash_does_not_know_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(redaction, "_seen", {})
    monkeypatch.setattr(redaction, "_scanned", {})
    given = ["+extra.plain='${oc.env:VALUE}'", "+extra.api_key='${oc.env:VALUE}'", "+extra.url='https://${oc.env:MY_TOKEN}@${extra.host}'"]
    given += ["+extra.host=example", "+extra.again='${extra.url}'"]
    hashes = set()
    for number in range(2):
        monkeypatch.setenv("MY_TOKEN", f"tops3cret-{number}")
        monkeypatch.setenv("VALUE", "an-ordinary-one")
        code, (job,) = command_line(monkeypatch, tmp_path, *given, f"hydra.run.dir=outputs/{number}")
        assert code == 0
        url = "https://${oc.env:MY_TOKEN}@example"
        expected = {"plain": "an-ordinary-one", "api_key": "${oc.env:VALUE}", "url": url, "host": "example", "again": url}
        assert job.config.tree["extra"] == expected
        hashes.add(job.config.hash())
    assert len(hashes) == 1
    assert "tops3cret" not in written(tmp_path) + job.to_json()
    code, (job,) = command_line(monkeypatch, tmp_path, "resume", "outputs/1")
    assert (code, job.config.tree["extra"]) == (0, expected)
    monkeypatch.delenv("MY_TOKEN")
    assert command_line(monkeypatch, tmp_path, "resume", "outputs/1")[0] == 2


BOMBS = {
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 8)),
    "references": "a0: xxxxxxxxxx\n" + "".join(f"a{n}: '{f'${{a{n - 1}}}' * 10}'\n" for n in range(1, 8)),
    "depth": "a: " + "[" * 200 + "]" * 200,
    "size": "a: " + "x" * 1_100_000,
    "chain": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)),
    "itself": "a: &a [*a]",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_in_a_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], bomb: str
) -> None:
    (tmp_path / "conf" / "bomb").mkdir(parents=True)
    (tmp_path / "conf" / "bomb" / "one.yaml").write_text("# @package _global_\n" + BOMBS[bomb])
    started = time.process_time()
    assert command_line(monkeypatch, tmp_path, "--config-dir=conf", "+bomb=one")[0] == 2
    said = capsys.readouterr().err
    assert "at most 1,000,000 characters, 50 levels and 100,000 values" in said
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(BOMBS[bomb])
    assert command_line(monkeypatch, tmp_path, "resume", "run")[0] == 2
    assert time.process_time() - started < 4
    assert not (tmp_path / "outputs").exists()


def test_an_override_that_is_too_deep_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, "+a=" + "[" * 300 + "]" * 300)[0] == 2
    assert "levels deep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "hydra:\n  callbacks:\n    evil: {_target_: pathlib.Path.touch, self: {_target_: pathlib.Path, _args_: [marker]}}\n",
        "hydra:\n  job_logging:\n    handlers:\n      x: {class: pickle.Unpickler, file: marker}\n",
        "hydra:\n  hydra_logging:\n    handlers:\n      x: {(): posix.system, command: touch marker}\n",
        "model:\n  width: {_target_: builtins.open, _args_: [marker, w]}\n",
        "metrics:\n  evil: {_target_: logging.FileHandler, filename: marker}\n",
        "model:\n  width:\n    deep: [{_target_: subprocess.Popen, args: [touch, marker], _partial_: true}]\n",
    ],
)
def test_a_yaml_cannot_call_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "conf" / "evil").mkdir(parents=True)
    (tmp_path / "conf" / "evil" / "one.yaml").write_text("# @package _global_\n" + text)
    code, jobs = command_line(monkeypatch, tmp_path, "--config-dir=conf", "+evil=one")
    assert (code, jobs) == (2, [])
    assert "standard library" in (said := capsys.readouterr().err) or "by its name" in said, said
    assert not (tmp_path / "marker").exists()
