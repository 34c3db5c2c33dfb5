"""What the configuration files say of each key: its value, what it means, where it stands. For `ddp-train help` and docs/reference.md.

The comments in conf/ are the only text there is; the schema adds types and ranges.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.schema import SECTIONS, RootConfig, subsection
from ddp_train.config.targets.locate import hints_of, look_up

_COMMENT = re.compile(r"(?:^|\s)#\s+(.*)$")
_DIRECTIVES = ("_target_", "_partial_", "defaults", "hydra")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key in one file."""

    name: str  # dotted, as it is typed
    value: str  # as it stands there
    meaning: str
    kind: str  # its type and range, where the schema has them; "" where a class's signature does
    file: Path
    line: int


@dataclass(frozen=True, kw_only=True)
class Option:
    """One file of a group."""

    group: str  # "" for the root
    name: str
    file: Path
    meaning: str  # its comment at the top
    target: str  # what it makes; "" where it makes nothing
    keys: list[Key]


def options(folder: Path) -> list[Option]:
    """Return every option of every group below a folder, and the root first."""
    files = sorted(path for path in folder.rglob("*.yaml") if "hydra" not in path.relative_to(folder).parts)
    found = [_option(path, str(path.parent.relative_to(folder)).removeprefix(".")) for path in files]
    return sorted(found, key=lambda option: (option.group, option.name))


def default_options(folder: Path) -> dict[str, str]:
    """Return the option of each group that config.yaml chooses."""
    entries: Any = yaml.safe_load((folder / "config.yaml").read_text())["defaults"]
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    fixed = dict(entry.split("/") for entry in entries if isinstance(entry, str) and "/" in entry)
    return {**{group: str(option) for group, option in pairs if isinstance(option, str) and " " not in group}, **fixed}


_LED_TO = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
"""The module before the name of a type, which says little, and is another one where the class was read and not imported."""


def argument_type(target: str, name: str) -> str:
    """Return the type that a class's signature has for an argument; "" where it has none, or the class cannot be imported here."""
    try:
        hint = hints_of(look_up(target)).get(name)
    except Exception:  # a package that is not installed, or a user's module that raises
        return ""
    return "" if hint is None else _LED_TO.sub("", inspect.formatannotation(hint))


def _option(file: Path, group: str) -> Option:
    with file.open() as stream:  # which names the file where it cannot be read
        tree = yaml.compose(stream)
    lines = file.read_text().splitlines()
    top = [line.removeprefix("#").strip() for line in lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)]]
    is_global = "@package _global_" in top
    prefix = "" if is_global or not group else f"{group.replace('/', '.')}."
    keys = [*_keys(tree, prefix, lines, file)]
    target = next((match[1] for line in lines if (match := re.match(r"\s*_target_: (\S+)", line))), "")
    meaning = " ".join(line for line in top if line != "@package _global_")
    return Option(group=group, name=file.stem, file=file, meaning=meaning, target=target, keys=keys)


def _keys(node: Any, prefix: str, lines: Sequence[str], file: Path) -> Iterator[Key]:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        key, line = f"{prefix}{name.value}", name.start_mark.line
        if name.value in _DIRECTIVES or key.startswith("hydra."):
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
    """Return the comment of a line, from a column on, and of the lines below it that go on with it."""
    found = _COMMENT.search(lines[line], start)
    if found is None:
        return ""
    parts = [found[1]]
    for following in lines[line + 1 :]:
        if not re.match(r"^\s+#\s", following):
            break
        parts.append(following.strip().removeprefix("#").strip())
    return " ".join(parts)


def kind_of(key: str) -> str:
    """Return the type and the range of a key of our own sections; "" for any other."""
    section, _, rest = key.partition(".")
    schema: Any = SECTIONS.get(section) if rest else RootConfig
    for name in (rest or section).split("."):
        fields = {item.name: item for item in dataclasses.fields(schema)} if schema is not None else {}
        if name not in fields:
            return ""
        item, schema = fields[name], subsection(fields[name])
    parts = [] if str(item.type) == "Any" or schema is not None else [str(item.type).replace(" | None", " or null")]
    rule = item.metadata
    parts += [f"at least {rule['min']}"] if "min" in rule else []
    parts += [f"more than {rule['above']}"] if "above" in rule else []
    parts += [f"one of {', '.join(rule['one_of'])}"] if "one_of" in rule else []
    if "parse" in rule:
        try:
            rule["parse"](object())
        except ValueError as error:
            parts.append(str(error))
        except TypeError:
            pass
    return ", ".join(parts)
