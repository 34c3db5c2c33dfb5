"""A configuration must not leave its place, carry a secret or grow without end; what others wrote runs only where it was accepted."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_train.run_folder import trust
from ddp_train.system import redaction
from tests.config.test_config import command_line


@pytest.fixture(autouse=True)
def nothing_accepted() -> Iterator[None]:
    yield
    trust._accepted.clear()


def written(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["name=../../x"], "name: is '../../x'"),
        (["name='a\nb'"], r"name: is 'a\nb'"),
        (["hydra.run.dir=outputs/${oc.env:PLACE}/x"], "a name must not change the folder"),
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


def test_your_own_runs_ask_nothing_and_what_others_could_have_written_is_shown_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "outputs" / "run"
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=outputs/run")[0] == 0
    assert command_line(monkeypatch, tmp_path, "resume", "outputs/run")[0] == 0
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    for path in (run, run / "config.yaml", run / "checkpoints" / "step_00000001"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        for words in (["resume", "outputs/run"], ["hydra.run.dir=outputs/run"]):
            trust._accepted.clear()
            assert command_line(monkeypatch, tmp_path, *words)[0] == 2
            said = capsys.readouterr().err
            assert f"every user can write {path}" in said and "ddp-train resume" in said and "--trust" in said
        path.chmod(mode)
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "config.yaml")
    assert command_line(monkeypatch, tmp_path, "resume", "outputs/run")[0] == 2
    assert "is a link" in capsys.readouterr().err


def test_a_checkpoint_that_goes_away_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / ".partial_step_00000005_1_2"
    partial.mkdir(parents=True)
    look = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path == partial and partial.exists():
            partial.rmdir()
        return look(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    trust.require_trust(tmp_path, key="RUN", accept="--trust")
    assert not partial.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_holder_that_a_stranger_has_left_vouches_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=outputs/run")[0] == 0
    for name in (".holder.json", "config.yaml"):
        (tmp_path / "outputs/run" / name).touch()
        os.chown(tmp_path / "outputs/run" / name, 12345, -1)
    assert command_line(monkeypatch, tmp_path, "evaluate", "outputs/run")[0] == 2
    assert "belongs to another user (uid 12345)" in capsys.readouterr().err


CALLED = {"_target_": "evil.touch"}
ATTACKS: dict[str, tuple[str, Any, str]] = {  # file and key -> value, and what is shown of it
    **{
        f"config.yaml {key}": (f"{key}", CALLED, f"{key}._target_: evil.touch")
        for key in (
            *("model", "objective", "optimizer", "scheduler", "data", "strategy", "amp", "model.width", "data.transform", "data.eval"),
            *(
                "callbacks.x",
                "metrics.x",
                "loader.collate",
                "loader.sampler",
                "evaluation.metrics.x",
                "evaluation.sets.x",
                "extra.deep.down",
            ),
        )
    },
    **{
        f"config.yaml {name}": ("model._target_", name, f"model._target_: {name}")
        for name in (
            *("os.system", "subprocess.Popen", "builtins.exec", "torch.hub.load", "logging.FileHandler", "mine.os.system"),
            *("numpy.distutils.lib2def.getnm", "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_symexpr"),
            *("numpy.lib.format.open_memmap", "${oc.env:EVIL}"),
        )
    },
    "config.yaml object": ("model.activation", "${object:evil.touch}", "model.activation: ${object:evil.touch}"),
    "config.yaml interpolation": ("model", "${oc.create:${extra.text}}", "model: ${oc.create:${extra.text}}"),
    "config.yaml list": ("model._args_", [[CALLED]], "model._args_.0.0._target_: evil.touch"),
    "config.yaml hidden": ("model._target_", "evil.touch\x1b[2K\r", "'model._target_: evil.touch\\x1b[2K\\r'"),
    "config.yaml setup": ("cluster.setup", ["touch marker"], "cluster.setup.0: touch marker"),
    "config.yaml LD_PRELOAD": ("cluster.env.LD_PRELOAD", "./evil.so", "cluster.env.LD_PRELOAD: ./evil.so"),
    "config.yaml PYTHONPATH": ("cluster.env.PYTHONPATH", "/evil", "cluster.env.PYTHONPATH: /evil"),
    "config.yaml python": ("cluster.python", "/evil/python", "cluster.python: /evil/python"),
    "config.yaml hosts": ("cluster.hosts", ["evil"], "cluster.hosts.0: evil"),
    "sweep.json command": ("command", ["-m", "hydra.callbacks.x._target_=evil.touch"], "command.1: hydra.callbacks.x._target_=evil.touch"),
    "sweep.json config folder": ("command", ["--config-dir=/evil"], "command.0: --config-dir=/evil"),
    "conf/x.yaml logging": ("hydra.job_logging.handlers.x.class", "logging.FileHandler", "hydra.job_logging.handlers.x.class: logging"),
    "conf/x.yaml target": ("model", CALLED, "model._target_: evil.touch"),
    "spec.json target": ("job.config.model", CALLED, "job.config.model._target_: evil.touch"),
    "spec.json setup": ("job.config.cluster.setup", ["touch marker"], "job.config.cluster.setup.0: touch marker"),
    "spec.json code": ("code.folder", "/evil", "code.folder: /evil"),
    "spec.json folder": ("working_directory", "/evil", "working_directory: /evil"),
}


def plant(file: Path, key: str, value: Any) -> None:
    """Put a value into a YAML or JSON, and give the file away."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tree = yaml.safe_load(file.read_text()) if file.exists() else {}
    *above, last = key.split(".")
    node = tree
    for name in above:
        node[name] = node = dict(node.get(name) or {})
    node[last] = value
    file.write_text(json.dumps(tree) if file.suffix == ".json" else yaml.safe_dump(tree))
    give_away(file)


def give_away(path: Path) -> None:
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        path.chmod(path.stat().st_mode | 0o002)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run of the user's own, and a module that leaves a mark when it is imported, called or unpickled."""
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('marker').touch()\ndef touch(*args, **named): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=outputs/run")[0] == 0
    return tmp_path / "outputs/run"


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_another_user_has_written_runs_nothing_before_it_was_shown_and_accepted(
    monkeypatch: pytest.MonkeyPatch, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], attack: str
) -> None:
    file, (key, value, shown) = attack.split()[0], ATTACKS[attack]
    plant(mine / file, key, value)
    if "sweep" in attack or "conf/" in attack:
        (mine / "sweep.json").touch()
    path = str(mine / file) if file == "spec.json" else "outputs/run"
    commands = [["node", path]] if file == "spec.json" else [["resume", path]]
    if file == "config.yaml":
        commands += [["evaluate", path], ["predict", path], ["export", path, "--format=onnx"], ["resume", path, "trainer.max_steps=3"]]
    capsys.readouterr()
    for words in commands:
        assert command_line(monkeypatch, tmp_path, *words) == (2, [])
        said = capsys.readouterr().err
        assert shown in said and f"{shlex.join(['ddp-train', *words])} --trust" in said, said
        assert "\x1b" not in said
    assert not (tmp_path / "marker").exists()


def test_what_was_accepted_runs(monkeypatch: pytest.MonkeyPatch, mine: Path, tmp_path: Path) -> None:
    plant(mine / "config.yaml", "callbacks.x", {"_target_": "evil.touch"})
    code, (job,) = command_line(monkeypatch, tmp_path, "resume", "outputs/run", "--trust")
    assert code == 0 and job.config.tree["callbacks"]["x"] == {"_target_": "evil.touch"}
    monkeypatch.delitem(sys.modules, "evil", raising=False)


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
