"""`${object:torch.float32}`: a type, a class or a function as an argument, by its name, and not called.

It stays text in config.yaml, in the hash and between processes: `training/instantiate.py` puts the object in its place. Imports no torch.
"""

from __future__ import annotations

import re
from typing import Any

RESOLVER = "object"

_NAME = re.compile(r"\$\{object:([^{}]*)\}")


def name_in(value: Any) -> str | None:
    """Return the dotted name of the object that a value stands for; None: it stands for itself.

    Raises:
        ValueError: the object is a part of a text.
    """
    found = _NAME.search(value) if isinstance(value, str) else None
    if found and found[0] != value:
        raise ValueError(f"is {value!r}, and an object is no part of a text")
    return found[1].strip() if found else None
