"""Writes docs/reference.md from conf/ and the schema: `make reference`."""

from __future__ import annotations

from pathlib import Path

from ddp_train import CONF
from ddp_train.cli.help import Option, default_options, options

FILE = Path(__file__).parents[2] / "docs/reference.md"
_HEAD = """# Configuration reference

Every key of every option, as the files in `conf/` have it. `make reference` writes this page.
`ddp-train help KEY` says the same of one key.
A default that is `auto` takes what only the data or the run knows; `???` is a value that you must give.
"""


def page() -> str:
    """Return docs/reference.md."""
    chosen = default_options(CONF)
    parts, group = [_HEAD], None
    for option in options(CONF):
        if option.group != group:
            group = option.group
            parts.append(f"\n## {group or 'The root'}\n")
        parts.append(_section(option, is_default=chosen.get(option.group) == option.name))
    return "".join(parts)


def _section(option: Option, *, is_default: bool) -> str:
    title = f"\n### `{option.group}={option.name}`{' (default)' if is_default else ''}\n" if option.group else ""
    if option.group == "experiment":  # whose keys are those of others
        return f"{title}\n{_cell(option.meaning)}\n"
    makes = f" Makes `{option.target}`." if option.target and option.group else ""
    lines = [f"{title}\n{option.meaning}{makes}\n"]
    if option.keys:
        lines.append("\n| key | default | type | meaning |\n|---|---|---|---|\n")
    for key in option.keys:
        value = f"`{_cell(key.value)}`" if key.value else ""
        lines.append(f"| `{key.name}` | {value} | {_cell(key.kind)} | {_cell(key.meaning)} |\n")
    return "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(page())
