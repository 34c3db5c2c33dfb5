"""The commands, and what each says of itself."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_train.cli import main
from ddp_train.config.command.commands import COMMANDS
from ddp_train.errors import ConfigError
from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import JobRunner
from ddp_train.system.folder_lock import unlock_all
from tests.fake_runner import FakeRunner


def must_not_run(*given: object) -> int:
    raise AssertionError("something was started")


@pytest.fixture
def runner() -> JobRunner:
    return FakeRunner(must_not_run, slots=must_not_run)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_how_it_is_typed(
    name: str, runner: JobRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", name, "--help"])
    assert main.run(sys.argv[1:], runner) == 0
    assert capsys.readouterr().out.startswith(f"ddp-train {name} ")
    assert runner.begun_folder is None


@pytest.mark.parametrize("name", ["resume", "status"])
def test_a_command_without_its_folder_asks_for_it(
    name: str, runner: JobRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", name])
    assert main.run(sys.argv[1:], runner) == 2
    shown = capsys.readouterr().err
    assert f"expected: ddp-train {name} " in shown
    assert "configuration" not in shown and "started" not in shown  # nothing of it was asked for


IS_CUT_OFF = "mine/experiment/broken.yaml, line 2, column 7: is not valid YAML: "  # and the words of the parser, of which there are two


def failing(error: Exception) -> Callable[[object, object], int]:
    def command(arguments: object, runner: object) -> int:
        raise error

    return command


@pytest.mark.parametrize("error", [ValueError("a mistake of ours"), json.JSONDecodeError("Expecting value", "", 0)])
def test_an_error_that_is_not_hydras_is_no_mistake_of_the_command_line(
    error: Exception, runner: JobRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", "status", "RUN"])
    monkeypatch.setattr("ddp_train.cli.status.show_status", failing(error))
    assert main.run(sys.argv[1:], runner) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and str(error) in shown
    assert "is a command" not in shown and "configuration" not in shown and "resume" not in shown


def test_a_file_that_is_not_there_is_named(runner: JobRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", "status", "RUN"])
    monkeypatch.setattr("ddp_train.cli.status.show_status", failing(FileNotFoundError(2, "No such file or directory", "outputs/gone")))
    assert main.run(sys.argv[1:], runner) == 2
    assert capsys.readouterr().err == "outputs/gone: No such file or directory; nothing was started\n"


def test_a_run_that_was_let_go_is_named_all_the_same(
    runner: JobRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given_to_an_engine(job: Job) -> int:
        unlock_all()
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddp-train", "cluster=cpu", "model=mlp", "hydra.run.dir=there"])
    runner.launch_job = given_to_an_engine
    assert main.run(sys.argv[1:], runner) == 78
    assert "`ddp-train resume there` continues it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        *((words, "seed: [1", IS_CUT_OFF) for words in ([], ["plan"], ["help"])),
        ([], "seed: !five 1", "line 2, column 7: is not valid YAML: could not determine a constructor for the tag '!five'"),
        (["plan"], "a: 1\na: 2", "mine/experiment/broken.yaml, line 2, column 1: is not valid YAML: found duplicate key a"),
        ([], "seed: \a", "unacceptable character #x0007"),
    ],
)
def test_a_yaml_that_cannot_be_read_is_named_with_its_line(
    words: list[str],
    content: str,
    said: str,
    runner: JobRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/broken.yaml").write_text(f"# @package _global_\n{content}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddp-train", *words, "experiment=broken", "--config-dir=mine"])
    assert main.run(sys.argv[1:], runner) == 2
    shown = capfd.readouterr().err
    assert said in shown and "Traceback" not in shown and len(shown.splitlines()) < 10


def test_a_command_imports_what_it_needs_alone() -> None:
    code = "import sys; import ddp_train.cli.main; print(*({'rich', 'asyncio', 'torch', 'ddp_train.launch.submit'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"plan", "doctor", "help", "prepare", "init", "completion", "schema"}))
def test_a_command_takes_the_options_that_its_help_names(name: str, runner: JobRunner) -> None:
    command = COMMANDS[name]
    module: Any = importlib.import_module(f"ddp_train.cli.{command.module}")
    in_help = set(re.findall(r"(?<![\w-])(?:--?[a-z][a-z-]*|to(?==))", getattr(module, command.usage)))
    taken = set()
    for words in [[], *([word] for word in command.words)]:
        with pytest.raises(ConfigError, match="is not an option") as refused:
            getattr(module, command.function)([*words, "RUN", "--nothing-like-it=1"], runner)
        taken |= {option for option in refused.value.expected.split(", ") if option}
    assert taken == in_help
