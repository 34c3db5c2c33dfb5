"""Every command and every YAML of README and docs is composed and checked, without starting anything.

tests/docs/pages.py says how pages are read.

What is typed at `ddp-train` comes to a configuration that passes the check, or, where the page shows a refusal, to exactly that message.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from ddp_train import CONF
from ddp_train.cli import main as command_line
from ddp_train.cli.help import options
from ddp_train.config.command.commands import COMMANDS
from ddp_train.config.schema import SECTIONS, TARGETS
from ddp_train.config.tree import dotted_items
from tests.docs.conftest import problems_of
from tests.docs.pages import PAGES, ROOT, Block, Command, blocks, inline, write_files
from tests.fake_runner import FakeRunner

CLOSED = (
    "seed",
    "trainer",
    "loader",
    "evaluation",
    "health",
    "checkpoint",
    "cluster",
    "sweep",
    "debug",
    "profile",
    "strategy",
    "amp",
    "callbacks",
    *("precision", "activation_checkpointing", "compile"),
)
"""Parts of a configuration whose keys are ours alone: any other name in a text is a mistake."""

OPTIONS = ("--help", "--version", "--cfg", "--info", "--full")


@pytest.mark.filterwarnings("default")  # of what pages import
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_can_be_typed(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_files(page, folder)
    problems: list[str] = []
    typed: list[list[str]] = []
    for block in blocks(page):
        for command in block.commands():
            if block.is_refused and command.words[0] == "ddp-train":
                problems += _refusal(block, command, monkeypatch, capsys)
            else:
                problems += [f"{command}\n{problem}" for problem in _problems(command, typed)]
    for file in files:
        if file.suffix == ".yaml" and not any(_names(words, file, folder) for words in typed):
            words = [f"--config-dir={file.relative_to(folder).parts[0]}", f"{file.parent.name}={file.stem}"]
            problems += [f"{page.name}: {file.name}\n{problem}" for problem in problems_of(words)]
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_that_a_page_names_exist(page: Path) -> None:
    known = known_keys()
    problems = [f"{page.name}: {name}" for name in _named_keys(page) if not _is_known(name, known)]
    for block in blocks(page):
        if block.is_yaml and block.file is None:
            content = yaml.safe_load(block.text)
            problems += [f"{page.name}:{block.line}: {key}" for key, _ in dotted_items(content) if not _is_known(key, known)]
    for command in inline(page):
        words = command.typed_at_ddp_train() or []
        if words and _is_command(words[0]) and words[0] not in COMMANDS:
            problems.append(f"{command}: there is no such command")
    assert not problems, "\n".join(problems)


def test_a_page_with_a_mistake_is_found(folder: Path) -> None:
    page = folder / "page.md"

    def found(text: str) -> str:
        page.write_text(text)
        block = blocks(page)[0]
        return "\n".join(problem for command in block.commands() for problem in _problems(Command(ROOT / "x.md", 1, command.words), []))

    assert "trainer.max_step=" not in found("Text.\n\n    ddp-train trainer.max_steps=3      # a remark\n")
    assert "did you mean trainer.max_steps=3?" in found("Text.\n\n    ddp-train trainer.max_stepz=3\n")
    assert "no command" in found("Text.\n\n    ddp-train fly RUN\n")
    assert "no target" in found("Text.\n\n    make coffee\n")
    assert not _is_known("trainer.max_stepz", known_keys())
    assert not _is_known("optimizer.learning_rate", known_keys())


@cache
def known_keys() -> set[str]:
    """Return every key that an option has, and the parts above it."""
    names = {key.name for option in options(CONF) for key in option.keys}
    names |= {f"data.eval.{name.removeprefix('data.')}" for name in names if name.startswith("data.")}
    return names | {".".join(name.split(".")[:count]) for name in names for count in range(1, name.count(".") + 1)}


def _is_known(name: str, known: set[str]) -> bool:
    """Tell whether a key exists; one that begins with a component's argument may be of any class."""
    section = name.partition(".")[0]
    if name in known or section in ("hydra", "extra") or re.fullmatch(r"[\w.]+\._(target|partial|args)_", name):
        return True
    free = ("init_from_keys", "cluster.env", "cluster.slurm.options", "evaluation.metrics", "optimizer.groups", "callbacks", "metrics")
    if any(name.startswith(f"{prefix}.") for prefix in free):
        return True
    return section not in (*SECTIONS, *TARGETS, *CLOSED) and "." in name


def _named_keys(page: Path) -> list[str]:
    """Return what is written as a key, `section.name` or `section.name=value`, in a page's text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    found = re.findall(r"`[+~]?([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", text)
    return [name for name in found if not name.endswith((".py", ".md", ".yaml", ".json", ".jsonl", ".csv", ".sh", ".log", ".npy", ".diff"))]


def _problems(command: Command, typed: list[list[str]]) -> list[str]:
    """Return what is wrong with a command that is to work."""
    if command.words[0] == "make":
        targets = (ROOT / "Makefile").read_text()
        return [f"make has no target {word}" for word in command.words[1:] if "=" not in word and f"\n{word}:" not in targets]
    if command.words[0] == "pip":
        extras = (ROOT / "pyproject.toml").read_text()
        asked = re.findall(r"ddp-train\[([\w,]+)\]", " ".join(command.words))
        return [f"there is no extra {name}" for names in asked for name in names.split(",") if f"\n{name} = [" not in extras]
    words = command.typed_at_ddp_train()
    if words is None:
        return []
    words = [word for word in words if "..." not in word and word not in ("[-m]", "key=value", "group=option")]
    if not words or words[0] in OPTIONS:
        return []
    if _is_command(words[0]):
        name, *words = words
        if name not in COMMANDS:
            return [f"ddp-train has no command {name!r}: {', '.join(COMMANDS)}"]
        if name not in ("plan", "doctor"):
            given = [word for word in words if "=" in word and not word.startswith(("-", "to="))] if name != "prepare" else []
            return [f"{word}: no such key" for word in given if not _is_known(word.lstrip("+~").partition("=")[0], known_keys())]
    typed.append(words)
    return problems_of(words)


def _is_command(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "~"))


def _names(words: list[str], file: Path, folder: Path) -> bool:
    """Tell whether a command takes a file of the page as an option."""
    return f"{file.parent.name}={file.stem}" in words and f"--config-dir={file.relative_to(folder).parts[0]}" in words


def _refusal(block: Block, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return nothing where a command is refused with the words that its block shows."""
    monkeypatch.setattr(sys, "argv", ["ddp-train", *command.words[1:]])
    code = command_line.run(command.words[1:], FakeRunner())
    said = capsys.readouterr().err.strip()
    shown = block.text.partition("\n")[2].strip()
    return [] if code == 2 and said == shown else [f"{command}\nexit code {code}, and it said\n{said}"]
