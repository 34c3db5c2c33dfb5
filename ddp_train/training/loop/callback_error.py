"""An exception of a callback, wherever the run calls it, says whose it is."""

from __future__ import annotations

from ddp_train.errors import UserError


def named(error: Exception, name: str, where: str) -> Exception:
    """Return the error, which says from now on that it is of the callback `name`, in its method `where`."""
    if isinstance(error, UserError):
        error.key = error.key or f"callbacks.{name}"
    else:
        error.add_note(f"config key: callbacks.{name} (in its `{where}`)")
    return error
