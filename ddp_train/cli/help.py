"""`ddp-train help KEY`: what a key, a group or an option is, which values it takes, and where it stands."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_train import FOLDER
from ddp_train.config.check import CONF
from ddp_train.config.command.composition import parse
from ddp_train.config.reference import Key, Option, argument_type, default_options, options
from ddp_train.config.spelling import nearest
from ddp_train.errors import DONE, ConfigError, UserError
from ddp_train.launch.launcher import Launcher

USAGE = """ddp-train help KEY | GROUP | GROUP=OPTION     [--config-dir=FOLDER]

  ddp-train help optimizer.lr      a key: what it is, its type and range, its value, the options that have it, the line where it stands
  ddp-train help optimizer         a group: its options
  ddp-train help optimizer=muon    an option: all of its keys
  ddp-train help trainer           a section: all of its keys
  ddp-train help docs/data.md      a page of the documentation; `ddp-train help docs` lists them

  docs/reference.md has everything at once; `ddp-train --help` has the commands.
"""
_WIDTH = 110
_DOCS = next((path for path in (FOLDER / "docs", FOLDER.parent / "docs") if path.is_dir()), FOLDER / "docs")
"""The pages: inside the installed package, or at the top of a checkout. The copy of a run has none."""


def explain(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train help KEY`: show what the configuration files say of it. Starts nothing."""
    args = parse(arguments)
    if len(args.overrides) != 1:
        print(USAGE)
        return DONE
    asked = str(args.overrides[0]).lstrip("+~")
    if asked == _DOCS.name or asked.endswith(".md"):
        _show_page(asked)
        return DONE
    own = [options(Path(args.config_dir).absolute())] if args.config_dir is not None else []
    known = [option for each in [*own, options(CONF)] for option in each]
    answer = "\n".join(_answer(asked, known))
    print(answer)
    for page in dict.fromkeys(re.findall(r"\bdocs/[\w/]+\.md", answer)):
        print(f"\n`ddp-train help {page}` shows that page.")
    return DONE


def _show_page(asked: str) -> None:
    """Show a page of the documentation, laid out on a terminal and as it is elsewhere; of the folder alone the list of all.

    Raises:
        UserError: there is none of this name.
    """
    pages = {f"{_DOCS.name}/{path.relative_to(_DOCS)}": path for path in sorted(_DOCS.rglob("*.md"))}
    if asked == _DOCS.name:
        print("\n".join(pages))
        return
    page = asked if asked in pages else f"{_DOCS.name}/{asked}"
    if page not in pages:
        names = {path.stem: known for known, path in pages.items()}
        fix = f"ddp-train help {names.get(nearest(Path(asked).stem, names) or '', _DOCS.name)}"
        raise UserError(happened=f"there is no page {asked!r}", expected="a page of `ddp-train help docs`", fix=fix)
    text = pages[page].read_text()
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text, end="")


def _answer(asked: str, known: Sequence[Option]) -> Iterator[str]:
    chosen = default_options(CONF)
    name, equals, value = asked.partition("=")
    of_group = [option for option in known if option.group == name]
    if of_group:
        meant = [option for option in of_group if option.name == value] if equals else of_group
        if not meant:
            raise _unknown(f"{name} has no option {value!r}", value, [option.name for option in of_group], f"{name}=")
        yield from _option(meant[0]) if len(meant) == 1 else _group(name, meant, chosen)
        return
    found = [(option, key) for option in known for key in option.keys if key.name == name]
    if not found:
        names = [key.name for option in known for key in option.keys]
        raise _unknown(f"there is no key {name!r}", name, dict.fromkeys([*names, *chosen]), "")
    yield from _key(found, chosen)


def _group(name: str, of_group: Sequence[Option], chosen: dict[str, str]) -> Iterator[str]:
    yield f"{name}: a group; one of"
    for option in of_group:
        mark = " (what a run has if nothing is said)" if chosen.get(name) == option.name else ""
        yield from _paragraph(f"  {name}={option.name}{mark}", option.meaning)
    yield f"\n`ddp-train help {name}=OPTION` shows the keys of one."


def _option(option: Option) -> Iterator[str]:
    yield from _paragraph(f"{option.group}={option.name}" if option.group else "the root", option.meaning)
    if option.target:
        yield f"    makes {option.target}"
    yield f"    stands in {_shown(option.file)}\n"
    for key in option.keys:
        yield from _paragraph(f"  {key.name}={key.value}" if key.value else f"  {key.name}", key.meaning)


def _key(found: Sequence[tuple[Option, Key]], chosen: dict[str, str]) -> Iterator[str]:
    section = found[0][1].name.partition(".")[0]  # an option of data sets keys of the loader, too: those are the loader's
    option, key = next((pair for pair in found if pair[0].group in ("", section) and chosen.get(section) in (None, pair[0].name)), found[0])
    kind = key.kind or argument_type(option.target, key.name.rpartition(".")[2])
    yield f"{key.name}={key.value}" + (f"    {kind}" if kind else "")
    meanings = [key.meaning, *(other.meaning for _, other in found)]
    yield from _paragraph("", next(filter(None, meanings), "has no comment of its own"))
    yield f"    stands in {_shown(key.file)}:{key.line}"
    for other, same in found:
        if same is not key:
            yield f"    {other.group}={other.name} has {same.value or 'keys of its own'}    {_shown(same.file)}:{same.line}"


def _paragraph(title: str, text: str) -> Iterator[str]:
    if title:
        yield title
    yield from textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _unknown(happened: str, name: str, names: Sequence[str] | dict[str, None], prefix: str) -> ConfigError:
    close = nearest(name, names)
    expected = "" if close else f"one of {', '.join(each for each in names if '.' not in each)}"
    fix = f"ddp-train help {prefix}{close}" if close else "ddp-train --help"
    return ConfigError(happened=happened, expected=expected, fix=fix)
