"""What a message says to type is accepted when it is pasted."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

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
