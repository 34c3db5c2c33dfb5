"""`cluster.setup` as lines of bash, with one meaning for every engine: a line has failed when its last command has, and is named."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence


def setup_lines(setup: Sequence[str], *, refuse: str, spell: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines, and after each what ends the script where it failed. A secret in one is named as it was written.

    Args:
        refuse: a function of the script, which is told what happened, and does not come back.
        spell: returns a line as the script has it, with its secrets.
    """
    for line in setup:
        yield spell(line)
        yield f"[ $? = 0 ] || {refuse} {shlex.quote(f'cluster.setup failed: {line}')}"
