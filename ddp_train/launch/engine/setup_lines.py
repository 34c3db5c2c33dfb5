"""`cluster.setup` as lines of bash, with one meaning for every engine: a line has failed when its last command has, and is named.

A secret stands in a line as the variable that has it, which every engine brings to the machines: no script holds its value.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ddp_train.errors import ConfigError
from ddp_train.redaction import reference, references


def setup_lines(setup: Sequence[str], *, refuse: str) -> Iterator[str]:
    """Yield the lines, and after each what ends the script where it failed.

    Args:
        refuse: a function of the script, which is told what happened, and does not come back.

    Raises:
        ConfigError: one has a line end: the scripts are read by people, line by line.
    """
    for line in setup:
        if "\n" in line or "\0" in line:
            raise ConfigError(key="cluster.setup", happened=f"{line!r} has a line end", expected="lines of bash, each an item of the list")
        yield _in_shell(line)
        yield f"[ $? = 0 ] || {refuse} {shlex.quote(f'cluster.setup failed: {line}')}"


def _in_shell(line: str) -> str:
    for name in references(line):
        line = line.replace(reference(name), f"${{{name}}}")
    return line
