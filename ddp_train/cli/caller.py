"""The process that has started this command from Python (`from_python.run`): it is told what became of it, and its end is a stop."""

from __future__ import annotations

import json
import os
from typing import Any

from ddp_train.system import handover
from ddp_train.system.process import stop_with_parent

_told: list[int] = []  # the descriptor of its file, if there is a caller


def find() -> None:
    """Look for the caller, at the very start of the command; without one the rest here does nothing."""
    pid, _, descriptor = os.environ.pop(handover.CALLER, "").partition(":")  # what this command starts has another one
    if descriptor:
        os.set_inheritable(int(descriptor), False)
        _told.append(int(descriptor))
        stop_with_parent(int(pid))


def tell(**facts: Any) -> bool:
    """Tell the caller something: `folder`, the run's; `error`, the text of what ended the command. False: there is none."""
    for descriptor in _told:
        os.write(descriptor, json.dumps(facts).encode() + b"\n")
    return bool(_told)
