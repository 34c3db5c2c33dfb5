"""What the documents say of names, files, keys and seconds is what the code has."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import yaml

from ddp_train import checkpoint
from ddp_train.cli.help import options
from ddp_train.config import schema
from ddp_train.config.check import merge
from ddp_train.config.command.commands import COMMANDS
from ddp_train.launch.agent import elastic
from ddp_train.launch.node import attempts, wire
from ddp_train.rank.blame import _PEER_REPORTS_S
from ddp_train.run_folder import starts
from ddp_train.system import folder_lock
from ddp_train.training.loop.hooks import Hooks
from ddp_train.watchdog import __main__

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


def test_the_map_of_checkpoint_has_all_of_its_modules() -> None:
    modules = {path.stem for path in Path(str(checkpoint.__file__)).parent.glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"\w+", str(checkpoint.__doc__)))


STORIES = {
    "Start": 18,
    "Step": 10,
    "Stop": 13,
    "Save": 14,
    "Restart": 14,
    "A user's torchrun": 8,
    "A hang": 8,
    "An evaluation": 8,
    "A configuration": 8,
    "A submission": 8,
    "A batch": 8,
    "Resume": 7,
    "Several machines": 8,
    "A sweep": 9,
    "A component": 6,
}
"""Of docs/architecture.md and docs/stories.md: how many files a reader opens at most."""


@pytest.mark.parametrize("story", STORIES)
def test_a_story_has_few_files_with_the_functions_to_read(story: str) -> None:
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("architecture", "stories"))
    lines = re.sub(r"\n\s+", " ", text.split(f"**{story}**: ")[1].split("\n\n")[1]).splitlines()
    rows = [re.match(r"\d+\. `([\w/.]+)` (`[\w.]+`(?: -> `[\w.]+`)*): \S", line) for line in lines]
    assert all(rows)
    assert len(rows) <= STORIES[story]
    assert {row[1]: gone for row in rows if row and (gone := {*re.findall(r"[\w.]+", row[2])} - names_in(ROOT / row[1]))} == {}


def test_the_map_has_the_layers_that_import_linter_keeps() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["ddp_train"])
    kept = {room: number for number, layer in enumerate(layers, 1) for room in layer.split(" | ") if room != "conf"}  # no code
    block = (ROOT / "docs/architecture.md").read_text().split("\nddp_train/\n")[1].split("\nconf/ ")[0]
    rows = re.findall(r"^  (\w[\w/ ]*?) +(\d)(?: |$)", block, re.MULTILINE)
    assert {room.strip("/"): int(number) for rooms, number in rows for room in rooms.split()} == kept


def test_the_tables_of_a_run_have_all_hooks_and_all_threads() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)`: ", text, re.MULTILINE) == [point.name for point in fields(Hooks)]
    files = [*(ROOT / "ddp_train").rglob("*.py")]
    threads = {name for file in files for name in re.findall(r'Thread\(.*\bname=f?"([\w -]+)', file.read_text())}
    rows = text.split("Threads of a rank.")[1].split("Keys in the store")[0].splitlines()
    names = " ".join(row.split("|")[1] for row in rows if row.startswith("|"))
    assert threads == {name.removesuffix("...") for name in re.findall(r"`([\w .-]+)`", names)} != set()


def test_the_table_of_what_to_touch_is_short_and_names_what_there_is() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("## What to touch")[1].split("\n## ")[0]
    named = re.findall(r"`(ddp_train/[\w/]+\.py)` `([\w.]+)`", table)
    assert [(file, name) for file, name in named if name not in names_in(ROOT / file)] == []
    assert [folder for folder in re.findall(r"`([\w/]+/)`", table) if not (ROOT / folder).is_dir()] == []
    assert len(named) > 10
    assert len(re.findall(r"^\| an? ", table, re.MULTILINE)) <= 12


def names_in(file: Path) -> set[str]:
    """Return the names of a file's functions, classes and constants, those within a class as `Class.name`."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (f"{prefix}{target.id}" for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{node.name}"
                if isinstance(node, ast.ClassDef):
                    yield from names(node.body, f"{prefix}{node.name}.")

    return {*names(ast.parse(file.read_text()).body, "")}


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_files_and_links_exist(doc: Path) -> None:
    text = doc.read_text()
    named = re.findall(r"(?<![\w./-])(?:ddp_train|tests|docs|conf|hydra_plugins|launch)/[\w./-]+\.(?:py|md|yaml|sh)\b", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (doc.parent / link).exists()] == []
    folders = ("ddp_train", "tests", "hydra_plugins", "examples")
    modules = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    shortened = re.findall(r"`([\w/]+\.py)`", text)  # `loader.py`, `loader/loader.py`
    assert [name for name in shortened if not any(module.endswith(f"/{name}") for module in modules)] == []
    targets = (ROOT / "Makefile").read_text()
    assert [name for name in re.findall(r"`make (\w+)", text) if f"\n{name}:" not in targets] == []


DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))  # not history.md, which speaks of what is gone
OF_OTHERS = {
    *("BlendedDataset", "BootStrapper", "ControlMaster", "SearchPathPlugin", "_apply_optimizer_in_backward", "checkpoint_wrapper"),
    *("dcp_to_torch_save", "file_system", "interleave_datasets", "is_locked", "max_shard_size", "mkl_set_num_threads", "on_exception"),
    *("optuna_sweeper", "set_requires_gradient_sync", "suppress_errors", "to_empty"),
}
"""Names in decisions that are other libraries', and that we do not use."""


def test_names_in_decisions_are_those_of_the_code() -> None:
    folders = ("ddp_train", "hydra_plugins", "conf", "tests", "starter", "examples")
    code = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".yaml", ".sh") and file != Path(__file__)
    ]
    known = {word for file in code for word in re.findall(r"\w+", file.read_text())} | OF_OTHERS
    named = re.compile(r"`(_?[a-z]+_[a-z_]+|(?:[A-Z][a-z]+){2,})(?:\(\))?`")
    assert {decision.name: gone for decision in DECISIONS if (gone := {*named.findall(decision.read_text())} - known)} == {}


def test_members_in_docs_are_those_of_their_class() -> None:
    trees = [ast.parse(file.read_text()) for file in (ROOT / "ddp_train").rglob("*.py")]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def words(name: str) -> set[str]:
        node = classes[name]
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        return {*re.findall(r"\w+", ast.unparse(node))}.union(*map(words, bases))

    named = re.compile(r"`([A-Z]\w+)\.(\w+)")
    pages = [page for page in DOCS if page.name != "history.md"]
    pairs = [(page.name, *pair) for page in pages for pair in named.findall(page.read_text())]
    assert [pair for pair in pairs if pair[1] in classes and pair[2] not in words(pair[1])] == []


def test_a_decision_keeps_its_number() -> None:
    index, history = (" ".join((ROOT / f"docs/decisions/{name}.md").read_text().split()) for name in ("README", "history"))
    titles = {page: page.read_text().partition("\n")[0].removeprefix("# ") for page in DECISIONS}
    assert [page.name for page, title in titles.items() if f"[{title}]({page.name})" not in index] == []
    assert [page.name for page, title in titles.items() if not title.startswith(f"{int(page.name[:4])}. ")] == []
    replaced = {int(number) for number in re.findall(r"\| (\d+) \| [^|]+ \| \[", history.rpartition("| number |")[2])}
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert sorted([*numbers, *replaced]) == [*range(1, max(numbers) + 1)]


def test_a_file_has_the_names_that_decisions_place_in_it() -> None:
    placed = {
        (name, path)
        for decision in DECISIONS
        for names, path in re.findall(r"((?:`\w+`(?:, | and )?)+) in\s+`((?:ddp_train|tests)/[\w/]+\.py)`", decision.read_text())
        for name in re.findall(r"\w+", names)
    }
    assert placed
    assert [(name, path) for name, path in sorted(placed) if name not in {each.rpartition(".")[2] for each in names_in(ROOT / path)}] == []


OPTIONS = options(ROOT / "conf")
KEYS = {key.name for option in OPTIONS for key in option.keys} | {
    key for name, each in schema.SECTIONS.items() for key in schema.keys_of(each, f"{name}.")
}
OFFERED = {option.group: {other.name for other in OPTIONS if other.group == option.group} for option in OPTIONS if option.group}
OPEN = (
    "extra",
    "hydra",
    "init_from_keys",
    "callbacks",
    "metrics",
    "cluster.env",
    "cluster.slurm.options",
    "evaluation.sets",
    "evaluation.metrics",
    "optimizer.groups",
    "optimizer.parts",
)


def wrong_word(word: str) -> str | None:
    """Return what is wrong with `key=value` or `section.key` in a text; None for what is none of ours."""
    text, equals, value = word.strip("'\"").partition("=")
    key, is_added = text.lstrip("+~"), text.startswith("+")
    section = key.partition(".")[0]
    if not re.fullmatch(r"[a-z_]+(\.\w+)*", key) or section not in {*OFFERED, *schema.SECTIONS, *schema.ROOT_KEYS, "hydra"}:
        return None
    if not equals and (key == section or key.endswith((".json", ".csv", ".py"))):
        return None
    if key not in {*KEYS, *OFFERED, *schema.ROOT_KEYS} and not is_added and not key.startswith(OPEN) and not key.endswith("._target_"):
        return "no such key"
    if not equals or re.search(r"\.\.\.|[A-Z$]|^$", value):  # FILE stands for anything
        return None
    given = list(yaml.safe_load(value)) if value.startswith("[") else value.split(",")
    if key in OFFERED and not {str(each) for each in given} <= {*OFFERED[key], "mine"}:
        return f"no option of {sorted(OFFERED[key])}"
    if section in schema.SECTIONS and "." in key and key in KEYS and not key.startswith(OPEN) and "," not in value:
        errors = merge(schema.SECTIONS[section], {key.partition(".")[2]: yaml.safe_load(value)}, section).errors
        return next((str(error) for error in errors if error.key == key), None)
    return None


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_words_of_the_command_line_in_inline_code_are_understood(doc: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", doc.read_text(), flags=re.DOTALL | re.MULTILINE)
    codes = (
        [] if doc.parent.name == "decisions" or doc.name == "glossary.md" else re.findall(r"`([^`\n]+)`", text)
    )  # these speak of their day
    words = [word for code in codes for word in (shlex.split(code) if code.count("'") % 2 == 0 else code.split())]
    assert {word: wrong for word in words if (wrong := wrong_word(word)) is not None} == {}


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_commands_exist(doc: Path) -> None:
    named = re.findall(r"(?:^ *|[`$;(]|&& )ddp-train ([a-z]+)(?=[ `\n])", doc.read_text(), flags=re.MULTILINE)
    assert {*named} - {*COMMANDS} == set()


def test_a_wrong_word_is_found() -> None:
    wrong = ("compile=true", "trainer.max_step=3", "trainer.max_steps=many", "trainer.max_step", "model.widht=3", "cluster=slrum")
    right = ("compile=default", "'trainer.max_steps=3'", "trainer.max_steps", "model.width=16", "cluster=...", "+model.more=1", "to=FOLDER")
    assert [word for word in (*wrong, *right) if wrong_word(word)] == [*wrong]


def test_the_table_of_options_is_that_of_conf() -> None:
    table = (ROOT / "docs/components.md").read_text().partition("| group | options |\n|---|---|\n")[2].partition("\n\n")[0]
    listed = {}
    for row in table.splitlines():
        groups, options = row.strip("| ").split(" | ")
        for group in re.findall(r"`(\w+)`", groups):
            listed[group] = set(re.findall(r"`(\w+)`", options))
    found = {folder.name: {path.stem for path in folder.glob("*.yaml")} for folder in (ROOT / "conf").glob("[a-z]*/")}
    assert listed == {group: options for group, options in found.items() if group != "hydra"}


def test_every_fault_is_told() -> None:
    table = (ROOT / "docs/faults.md").read_text()
    assert [kind for kind in get_args(schema.Fault) if f"`{kind}`" not in table] == []
    assert f"[{len(get_args(schema.Fault))} faults]" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("doc", "says", "is_so"),
    [
        ("decisions/0006-agent.md", r"broke waits up to (\w+) seconds", _PEER_REPORTS_S),
        ("decisions/0013-watch.md", r"up to every ([\d.]+) s", __main__._POLL_S),
        ("decisions/0013-watch.md", r"was (\w+) seconds\s+late", __main__._GAP_S),
        ("decisions/0014-no-progress.md", r"after (\w+) restarts without one", starts.MAX_STARTS_WITHOUT_CHECKPOINT - 1),
        ("decisions/0014-no-progress.md", r"survivors of a failure ([\d.]+) s", elastic._SURVIVORS_S),
        ("security.md", r"refreshed every ([\d.]+) s", folder_lock.REFRESH_S),
        ("security.md", r"until it is ([\d.]+) s old", folder_lock._STALE_AFTER * folder_lock.REFRESH_S),
        ("multinode.md", r"silent for (\w+) seconds", wire.SILENT_S),
        ("multinode.md", r"on all terminals, (\w+) seconds after each", attempts._NAMED_AFTER_S),
    ],
)
def test_seconds_and_counts_are_those_of_the_code(doc: str, says: str, is_so: float) -> None:
    text = " ".join((ROOT / "docs" / doc).read_text().split())
    found = re.search(says, text)
    assert found is not None
    assert (NUMBERS.index(found[1]) if found[1] in NUMBERS else float(found[1])) == is_so


def test_the_first_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1000


@pytest.mark.parametrize("doc", [doc for doc in (*DOCS, ROOT / "CHANGELOG.md") if doc.name != "reference.md"], ids=lambda doc: doc.name)
def test_prose_has_lines_of_at_most_140_characters(doc: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", doc.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    assert [line for line in lines if len(line) > 140] == []
