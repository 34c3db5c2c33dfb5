"""What is typed, taken apart and put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.config.command.command_line import with_conf
from ddp_train.errors import ConfigError


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my conf").mkdir()
    return tmp_path / "pyproject.toml"


def test_words_get_the_folder_that_pyproject_names(project: Path) -> None:
    project.write_text('[tool.ddp_train]\nconf = "my conf"\n')
    assert with_conf(["a=1", "-m"]) == ["--config-dir=my conf", "a=1", "-m"]


@pytest.mark.parametrize("typed", [["--config-dir=x"], ["--config-dir", "x"], ["-cd", "x"], ["-cd=x"]])
def test_a_folder_that_is_typed_counts_instead(project: Path, typed: list[str]) -> None:
    project.write_text('[tool.ddp_train]\nconf = "nowhere"\n')
    assert with_conf([*typed, "a=1"]) == [*typed, "a=1"]


@pytest.mark.parametrize("text", [None, "", "[tool.other]\nconf = 1\n"])
def test_elsewhere_words_stay_as_they_are(project: Path, text: str | None) -> None:
    if text is not None:
        project.write_text(text)
    assert with_conf(["a=1"]) == ["a=1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[tool.ddp_train]\nconf = "cnf"\n', "no such folder"),
        ('[tool.ddp_train]\nconfs = "my conf"\n', "has {'confs': "),
        ('[tool.ddp_train]\nconf = "my conf"\nother = 1\n', "'other': 1}"),
        ("[tool.ddp_train]\nconf = 3\n", "has {'conf': 3}"),
        ("[tool.ddp_train\n", "cannot be read"),
    ],
)
def test_what_names_no_folder_is_an_error(project: Path, text: str, says: str) -> None:
    project.write_text(text)
    with pytest.raises(ConfigError) as raised:
        with_conf([])
    assert says in str(raised.value)
