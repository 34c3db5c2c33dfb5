"""What no `_target_` is meant to name: a few tools of Python's. It guards against mistakes, and is no boundary (docs/security.md)."""

from __future__ import annotations

from typing import Any

_TOOLS = ("os", "posix", "subprocess", "shutil", "sys", "socket", "importlib", "runpy")
_BUILTINS = ("eval", "exec", "compile", "open", "input", "print", "exit", "quit", "__import__")


def refuse(target: Any) -> str:
    """Return why what a `_target_` names is no component; "" when it may be one."""
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__qualname__", ""))
    is_tool = module.partition(".")[0] in _TOOLS or (module in ("builtins", "io", "_io") and name in _BUILTINS)
    return f"is {module}.{name}, a tool of Python's and no component" if is_tool else ""
