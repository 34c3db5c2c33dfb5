"""What a message says to type is accepted when it is pasted."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ddp_train import __version__
from tests.config.test_config import command_line


def advised(shown: str) -> list[str]:
    """Return the words that the only message says to type."""
    (fix,) = re.findall(r"^  fix: (.+)$", shown, re.MULTILINE)
    meant = re.search(r"did you mean (.+)\?|: (\S+)$", fix)
    return shlex.split((meant[1] or meant[2]) if meant else fix)


def paste(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    right: list[str],
    wrong: list[str],
    *,
    keeps: bool = False,
) -> tuple[str, dict[str, object]]:
    """Type a mistake, then what the message advises; return the message, and the configuration that it led to.

    Args:
        keeps: the advice is typed after what was wrong, not in its place.
    """
    assert command_line(monkeypatch, folder, *right, *wrong) == (2, [])
    shown = capsys.readouterr().err
    code, jobs = command_line(monkeypatch, folder, *right, *(wrong if keeps else []), *advised(shown))
    assert code == 0, capsys.readouterr().err
    return shown, jobs[0].config.tree


@pytest.mark.parametrize(
    ("wrong", "said", "keeps"),
    [
        (["+models=3"], "models: is no part of a configuration, and nothing reads it", False),
        (["+traner.max_steps=3"], "did you mean trainer.max_steps=3?", False),
        (["+lr=0.1"], "did you mean optimizer.lr=0.1?", False),
        (["+callbacks.es._target_=my.EarlyStopping"], "nobody makes another one", True),
        (["+logger.api_token_of=mine"], "values of your own, for ${extra.NAME}, stand below extra", False),
        (["+extra.mine._target_=builtins.dict"], "nothing below extra is made", True),
    ],
)
def test_what_nothing_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str, keeps: bool
) -> None:
    shown, _ = paste(monkeypatch, tmp_path, capsys, [], wrong, keeps=keeps)
    assert said in shown


def test_a_users_values_and_groups_have_their_place_below_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine/paths").mkdir(parents=True)
    (tmp_path / "mine/paths/home.yaml").write_text("width: 48\n")
    shown, tree = paste(monkeypatch, tmp_path, capsys, ["--config-dir=mine"], ["+paths=home"])
    assert tree["extra"] == {"width": 48} or tree["extra"] == {"paths": {"width": 48}}
    _, jobs = command_line(monkeypatch, tmp_path, "--config-dir=mine", *advised(shown), "model.width=${extra.paths.width}")
    assert jobs[0].config.tree["model"]["width"] == 48


def test_an_experiment_without_its_first_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/big.yaml").write_text("# Mine.\nseed: 7\nmodel:\n  width: 64\n")
    arguments = ["--config-dir=mine", "experiment=big"]
    assert command_line(monkeypatch, tmp_path, *arguments) == (2, [])
    shown = capsys.readouterr().err
    assert "big.yaml lacks the line `# @package _global_`" in shown and "(seed, model)" in shown
    subprocess.run(shown.rpartition("  fix: ")[2], shell=True, check=True, cwd=tmp_path)
    _, jobs = command_line(monkeypatch, tmp_path, *arguments)
    assert (jobs[0].config.tree["seed"], jobs[0].config.tree["model"]["width"]) == (7, 64)


@pytest.mark.parametrize(
    ("wrong", "said", "meant"),
    [
        (["optimizer.betas=[0.9,", "0.99]"], "the shell cuts at blanks", ["optimizer.betas=[0.9, 0.99]"]),
        (["optimizer.lr", "=0.1"], "came as 2 words, 'optimizer.lr', '=0.1'", ["optimizer.lr=0.1"]),
        (["optimizer.lr", "=", "0.1"], "came as 3 words", ["optimizer.lr=0.1"]),
        (["optimizer.lr=", "0.1"], "came as 2 words", ["optimizer.lr=0.1"]),
        (["optimizer.betas=[0.9"], "as many brackets closed as opened", ["optimizer.betas=[0.9]"]),
        (["data=mnist", "data.root=my(1)"], "quotes around text", ['data.root="my(1)"']),
        (["--trainer.max_steps=3"], "key=value without dashes", ["trainer.max_steps=3"]),
        (["--multrun"], "is no option", ["--multirun"]),
        (["model", "mlp"], "has no option behind it", ["model=mlp"]),
        (["trainer.max_stepz=3"], "is not a key", ["trainer.max_steps=3"]),
        (["lr=0.1"], "is not a key", ["optimizer.lr=0.1"]),
        (["mine=0.1"], "values of your own", ["+extra.mine=0.1"]),
        (["optimizer.amsgrad=true"], "torch.optim.AdamW takes it", ["+optimizer.amsgrad=true"]),
        (["+optimizer.lr=0.1"], "is in the configuration already", ["optimizer.lr=0.1"]),
        (["optimizer=sgd", "~optimizer.fused"], "is null, and Hydra does not remove that", ["optimizer.fused=0", "~optimizer.fused"]),
        (["cluster.env.NCCL_DEBUG=INFO"], "a + before what is added", ["+cluster.env.NCCL_DEBUG=INFO"]),
        (["--config-name=confg"], "there is no confg.yaml", ["--config-name=config"]),
        (["--config-name=nowhere"], "there is no nowhere.yaml", ["--config-name=config"]),
    ],
)
def test_what_hydra_refuses_says_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str, meant: list[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, *wrong) == (2, [])
    shown = capsys.readouterr().err
    assert said in shown, shown
    assert advised(shown) == meant, shown
    right = [text for text in wrong if text in ("data=mnist", "optimizer=sgd")]
    if meant != ["--multirun"]:  # of nothing, which Hydra runs as a sweep of one
        assert command_line(monkeypatch, tmp_path, *right, *meant)[0] == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said", "meant"),
    [
        (["train", "model=mlp"], "ddp-train without one trains", ["model=mlp"]),
        (["model=mlp", "runs", "s"], "the command first", ["runs", "s", "model=mlp"]),
        (["rusume", "s"], "no command 'rusume'", ["resume", "s"]),
        (["version"], "an option", ["--version"]),
        (["s"], "is the folder of a run", ["resume", "s"]),
    ],
)
def test_a_word_that_is_no_command_says_which_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], said: str, meant: list[str]
) -> None:
    command_line(monkeypatch, tmp_path, "hydra.run.dir=s")
    assert command_line(monkeypatch, tmp_path, *typed) == (2, [])
    shown = capsys.readouterr().err
    assert said in shown, shown
    assert advised(shown) == ["ddp-train", *meant]
    if "model=mlp" not in meant[1:]:
        assert command_line(monkeypatch, tmp_path, *meant)[0] == 0


def test_a_run_has_its_evaluation_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(monkeypatch, tmp_path, "evaluate", "outputs/default/x") == (2, [])
    shown = capsys.readouterr().err
    assert "a run evaluates as it trains" in shown
    assert advised(shown) == ["cat", "outputs/default/x/result.json"]


def test_nothing_is_suggested_where_nothing_is_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in ("trainer.early_stopping", "trainer.early_stopping=true", "+trainer.early_stopping=true"):
        assert command_line(monkeypatch, tmp_path, typed) == (2, [])
        shown = capsys.readouterr().err
        assert "did you mean" not in shown, shown
        assert "max_steps" in shown and "max_epochs" in shown, shown  # what there is


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", [["resume"], ["runs"], ["prepare"], ["prepare", "tokens"], ["resume", "somewhere"]])
def test_every_command_has_its_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    assert command_line(monkeypatch, tmp_path, *command, option) == (0, [])
    assert capsys.readouterr().out.startswith(f"ddp-train {command[0]} ")


def test_the_version_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(monkeypatch, tmp_path, "--version") == (0, [])
    assert capsys.readouterr().out == f"ddp_train {__version__}\n"
