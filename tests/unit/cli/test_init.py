"""A project to start from: `ddp-train init DIR`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_train.cli.compose import check_composed
from ddp_train.cli.init import init, starter
from ddp_train.config.command.command_line import with_conf
from ddp_train.config.command.composition import loader_of, parse
from ddp_train.errors import UserError
from tests.fake_runner import FakeRunner


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*words: str) -> int:
    runner: Any = FakeRunner()
    return init(list(words), runner)


def test_it_is_called_as_its_folder_and_its_conf_is_found_and_checked_there(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make("My-waves.2") == 0
    made = here / "My-waves.2"
    assert "cd My-waves.2" in capsys.readouterr().out
    files = {str(file.relative_to(made)) for file in made.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert files >= {
        "README.md",
        "pyproject.toml",
        "my_waves_2/model.py",
        "conf/project/default.yaml",
        "tests/test_my_waves_2.py",
        ".gitignore",
        ".schema/config.json",
    }
    assert "my_waves_2.model.WaveNet" in (made / ".schema/model.json").read_text()
    assert not [file for file in files if "my_project" in (made / file).read_text() or "my-project" in (made / file).read_text()]
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))  # as the command does with the folder where one stands
    args = parse(with_conf(["experiment=wide"]))
    composed = loader_of(args).load_configuration("config", args.overrides, run_mode=run_mode())
    found = check_composed(composed, composed.hydra)
    assert (found.model["_target_"], found.model["width"], found.data["noise"]) == ("my_waves_2.model.WaveNet", 32, 0.9)
    assert list(found.callbacks) == ["weight_norm"] and list(found.evaluation.metrics) == ["worst_class"]


def test_a_project_without_schemas_is_a_project_and_is_told_how_to_write_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert make("waves") == 0
    assert "ddp-train schema .schema" in capsys.readouterr().out
    assert (here / "waves/pyproject.toml").exists() and not (here / "waves/.schema").exists()


def run_mode() -> Any:
    from hydra import version
    from hydra.types import RunMode

    version.setbase("1.3")
    return RunMode.RUN


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no DIR was given"),
        (["a", "b"], "no DIR was given"),
        (["1st"], "not a valid name of a Python package"),
        (["__main__"], "not a valid name of a Python package"),
        (["class"], "class is not a valid name of a Python package"),
        (["torch"], f"there is a module torch already: {importlib.util.find_spec('torch').origin}"),  # type: ignore[union-attr]
        (["sys"], "there is a module sys already\n"),
        (["full"], "full exists already and has files in it"),
        (["full/file"], "full/file exists already and is a file"),
    ],
)
def test_what_cannot_be_a_project_is_refused_and_nothing_is_written(here: Path, words: list[str], says: str) -> None:
    (here / "full").mkdir()
    (here / "full/file").touch()
    with pytest.raises(UserError) as raised:
        make(*words)
    assert says in str(raised.value)
    assert sorted(path.name for path in here.rglob("*")) == ["file", "full"]


def test_a_folder_is_called_what_it_is_called_where_it_lies(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine/inner").mkdir(parents=True)
    monkeypatch.chdir(here / "mine/inner")
    with pytest.raises(UserError, match="exists already"):
        make("..")
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    make(".")
    assert (here / "empty/empty/__init__.py").exists()


def test_an_empty_folder_is_filled(here: Path) -> None:
    (here / "mine").mkdir()
    assert make("mine") == 0 and (here / "mine/mine/model.py").exists()


def test_the_parts_of_the_starter_do_what_its_tests_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its tests that start no run; tests/distributed/test_starter.py runs all of them."""
    monkeypatch.syspath_prepend(str(starter()))
    spec = importlib.util.spec_from_file_location("starter_tests", starter() / "tests/test_my_project.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_the_model_takes_what_the_data_gives()
    module.test_the_worst_class_counts()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        del sys.modules[name]
