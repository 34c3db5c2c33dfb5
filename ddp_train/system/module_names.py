"""Names of our own modules where text is needed: to start one as a process, to know one in a stack, to allow one in a config.

Such a name stands for a module that is too heavy to import there, or lies in a room above. A module that moves would leave it behind, and
nobody would notice: a stack that is looked for is just never found.
"""

from __future__ import annotations

from importlib.util import find_spec

from ddp_train import FOLDER


def module_name(name: str) -> str:
    """Return a name after a look whether there is such a module or package, which is not imported.

    Raises:
        ModuleNotFoundError: there is none.
    """
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"{name} is named in our code, and there is no such module", name=name)
    return name


def source_path(name: str) -> str:
    """Return how the path of such a module's source ends (`ddp_train/rank/stop.py`), or what a package's paths have (`ddp_train/data/`)."""
    path = module_name(name).replace(".", "/")
    return f"{path}/" if (FOLDER.parent / path).is_dir() else f"{path}.py"
