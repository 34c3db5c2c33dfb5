"""`ddp-train help KEY`: explain a key, a group or an option, with its values and its file. docs/reference.md is made with it.

The text is the comments in conf/; the schema adds types and ranges.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from ddp_train import CONF, FOLDER
from ddp_train.config.command.composition import parse, shown
from ddp_train.config.schema import SECTIONS, RootConfig, describe, subsection
from ddp_train.config.spelling import nearest
from ddp_train.config.targets.locate import look_up
from ddp_train.config.targets.target import hints_of
from ddp_train.errors import DONE, ConfigError, UserError
from ddp_train.launch.job_runner import JobRunner

USAGE = """ddp-train help KEY | GROUP | GROUP=OPTION     [--config-dir=FOLDER] [--json]

  ddp-train help optimizer.lr      a key: its meaning, type, range and value, the options that have it, its file and line
  ddp-train help optimizer         a group: its options
  ddp-train help optimizer=muon    an option: all of its keys
  ddp-train help trainer           a section: all of its keys
  ddp-train help optimizer --json  the same as JSON, one object a line: an option with its keys, or a key of an option
  ddp-train help docs/data.md      a page of the documentation; `ddp-train help docs` lists them

  docs/reference.md lists all keys; `ddp-train --help` lists the commands.
"""
_WIDTH = 110
_COMMENT = re.compile(r"(?:^|\s)#\s+(.*)$")
_MODULE = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
"""The module before the name of a type: it says little, and differs where the class was parsed and not imported."""
_NO_KEYS = ("_target_", "_partial_", "defaults", "hydra")
_DOCS = next((path for path in (FOLDER / "docs", FOLDER.parent / "docs") if path.is_dir()), FOLDER / "docs")
"""The pages: inside the installed package, or at the top of a checkout. The source copy of a run has none."""


def explain(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train help KEY`: show the comments of the configuration files on it. Starts nothing."""
    args = parse([word for word in arguments if word != "--json"])
    if len(args.overrides) != 1:
        print(USAGE)
        return DONE
    topic = str(args.overrides[0]).lstrip("+~")
    if topic == _DOCS.name or topic.endswith(".md"):
        _show_page(topic)
        return DONE
    of_project = options(Path(args.config_dir).absolute()) if args.config_dir is not None else []
    matching, places = _find(topic, [*of_project, *options(CONF)])
    if "--json" in arguments:
        entries = [*map(asdict, matching), *({"group": option.group, "option": option.name, **asdict(key)} for option, key in places)]
        print(*(json.dumps(entry, default=str) for entry in entries), sep="\n")
        return DONE
    defaults = default_options(CONF)
    found = _option(matching[0]) if len(matching) == 1 else _key(places, defaults) if places else _group(matching, defaults)
    print(answer := "\n".join(found))
    for page in dict.fromkeys(re.findall(r"\bdocs/[\w/]+\.md", answer)):
        print(f"\n`ddp-train help {page}` shows that page.")
    return DONE


def _show_page(topic: str) -> None:
    """Show a page of the documentation, formatted on a terminal; for the folder a list of all. UserError: there is no such page."""
    pages = {f"{_DOCS.name}/{path.relative_to(_DOCS)}": path for path in sorted(_DOCS.rglob("*.md"))}
    if topic == _DOCS.name:
        print("\n".join(pages))
        return
    page = topic if topic in pages else f"{_DOCS.name}/{topic}"
    if page not in pages:
        page_of = {path.stem: name for name, path in pages.items()}
        fix = f"ddp-train help {page_of.get(nearest(Path(topic).stem, page_of) or '', _DOCS.name)}"
        raise UserError(happened=f"there is no page {topic!r}", expected="a page of `ddp-train help docs`", fix=fix)
    text = pages[page].read_text()
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text, end="")


def _find(topic: str, all_options: Sequence[Option]) -> tuple[list[Option], list[tuple[Option, Key]]]:
    """Return the options of a group that a word names, or the places of a key. ConfigError: it is neither."""
    group, equals, name = topic.partition("=")
    of_group = [option for option in all_options if option.group == group]
    matching = [option for option in of_group if option.name == name] if equals else of_group
    places = [(option, key) for option in all_options for key in option.keys if key.name == group and not of_group]
    if of_group and not matching:
        raise _unknown(f"{group} has no option {name!r}", name, [option.name for option in of_group], f"{group}=")
    if not of_group and not places:
        names = [key.name for option in all_options for key in option.keys]
        raise _unknown(f"there is no key {group!r}", group, dict.fromkeys([*names, *default_options(CONF)]), "")
    return matching, places


def _group(of_group: Sequence[Option], defaults: dict[str, str]) -> Iterator[str]:
    name = of_group[0].group
    yield f"{name}: a group; one of"
    for option in of_group:
        mark = " (the default)" if defaults.get(name) == option.name else ""
        yield from _paragraph(f"  {name}={option.name}{mark}", option.meaning)
    yield f"\n`ddp-train help {name}=OPTION` shows the keys of one."


def _option(option: Option) -> Iterator[str]:
    yield from _paragraph(f"{option.group}={option.name}" if option.group else "the root", option.meaning)
    if option.target:
        yield f"    makes {option.target}"
    yield f"    defined in {shown(option.file)}\n"
    for key in option.keys:
        yield from _paragraph(f"  {key.name}={key.value}" if key.value else f"  {key.name}", key.meaning)


def _key(places: Sequence[tuple[Option, Key]], defaults: dict[str, str]) -> Iterator[str]:
    section = places[0][1].name.partition(".")[0]  # an option of `data` may set keys of `loader`: those belong to `loader`
    of_default = (place for place in places if place[0].group in ("", section) and defaults.get(section) in (None, place[0].name))
    option, key = next(of_default, places[0])
    kind = key.kind or argument_type(option.target, key.name.rpartition(".")[2])
    yield f"{key.name}={key.value}" + (f"    {kind}" if kind else "")
    meanings = [key.meaning, *(other_key.meaning for _, other_key in places)]
    yield from _paragraph("", next(filter(None, meanings), "has no comment"))
    yield f"    defined in {shown(key.file)}:{key.line}"
    for other, other_key in places:
        if other_key is not key:
            yield f"    {other.group}={other.name} has {other_key.value or 'keys of its own'}    {shown(other_key.file)}:{other_key.line}"


def _paragraph(title: str, text: str) -> Iterator[str]:
    if title:
        yield title
    yield from textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _unknown(happened: str, name: str, names: Sequence[str] | dict[str, None], prefix: str) -> ConfigError:
    close = nearest(name, names)
    expected = "" if close else f"one of {', '.join(known for known in names if '.' not in known)}"
    fix = f"ddp-train help {prefix}{close}" if close else "ddp-train --help"
    return ConfigError(happened=happened, expected=expected, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key in one file."""

    name: str  # dotted, as it is typed
    value: str  # as in the file
    meaning: str
    kind: str  # its type and range, where the schema has them; "" where a class's signature has them
    file: Path
    line: int


@dataclass(frozen=True, kw_only=True)
class Option:
    """One file of a group."""

    group: str  # "" for the root
    name: str
    file: Path
    meaning: str  # its comment at the top
    target: str  # its `_target_`; "" where it has none
    keys: list[Key]


def options(folder: Path) -> list[Option]:
    """Return every option of every group below a folder, and the root first."""
    files = sorted(path for path in folder.rglob("*.yaml") if "hydra" not in path.relative_to(folder).parts)
    unsorted = [_read_option(path, str(path.parent.relative_to(folder)).removeprefix(".")) for path in files]
    return sorted(unsorted, key=lambda option: (option.group, option.name))


def default_options(folder: Path) -> dict[str, str]:
    """Return the option of each group that config.yaml chooses."""
    entries: Any = yaml.safe_load((folder / "config.yaml").read_text())["defaults"]
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    fixed = dict(entry.split("/") for entry in entries if isinstance(entry, str) and "/" in entry)
    return {**{group: str(option) for group, option in pairs if isinstance(option, str) and " " not in group}, **fixed}


def argument_type(target: str, name: str) -> str:
    """Return an argument's type in a class's signature; "" where it has none, or the class cannot be imported here."""
    try:
        hint = hints_of(look_up(target)).get(name)
    except Exception:  # a package that is not installed, or a user's module that raises
        return ""
    return "" if hint is None else _MODULE.sub("", inspect.formatannotation(hint))


def _read_option(file: Path, group: str) -> Option:
    with file.open() as stream:  # errors of a stream name its file
        tree = yaml.compose(stream)
    lines = file.read_text().splitlines()
    top = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    prefix = "" if "@package _global_" in top or not group else f"{group.replace('/', '.')}."
    keys = [*_keys(tree, prefix, lines, file)]
    target = next((match[1] for line in lines if (match := re.match(r"\s*_target_: (\S+)", line))), "")
    meaning = " ".join(line for line in top if not line.startswith(("@package", "yaml-language-server:")))
    return Option(group=group, name=file.stem, file=file, meaning=meaning, target=target, keys=keys)


def _keys(mapping: Any, prefix: str, lines: Sequence[str], file: Path) -> Iterator[Key]:
    if not isinstance(mapping, yaml.MappingNode):
        return
    for name, value in mapping.value:
        key, line = f"{prefix}{name.value}", name.start_mark.line
        if name.value in _NO_KEYS or key.startswith("hydra."):
            continue
        if isinstance(value, yaml.MappingNode) and value.value and value.start_mark.line > line:
            if meaning := _meaning(lines, line):
                yield Key(name=key, value="", meaning=meaning, kind="", file=file, line=line + 1)
            yield from _keys(value, f"{key}.", lines, file)
            continue
        end = value.end_mark.column if value.end_mark.line == line else name.end_mark.column + 1
        text = lines[line][name.end_mark.column + 1 : end].strip()
        yield Key(name=key, value=text, meaning=_meaning(lines, line, end), kind=kind_of(key), file=file, line=line + 1)


def _meaning(lines: Sequence[str], line: int, start: int = 0) -> str:
    """Return the comment of a line, from a column on, and of the lines below that continue it."""
    comment = _COMMENT.search(lines[line], start)
    if comment is None:
        return ""
    following = takewhile(re.compile(r"\s+#\s").match, lines[line + 1 :])
    return " ".join([comment[1], *(text.strip().removeprefix("#").strip() for text in following)])


def kind_of(key: str) -> str:
    """Return the type and the range of a key of our own sections; "" for any other."""
    section, _, rest = key.partition(".")
    inner: Any = SECTIONS.get(section) if rest else RootConfig
    for name in (rest or section).split("."):
        schema, fields = inner, {item.name: item for item in dataclasses.fields(inner)} if inner is not None else {}
        if name not in fields:
            return ""
        item, inner = fields[name], subsection(fields[name])
    return describe(schema, item)
