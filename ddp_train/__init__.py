"""ddp_train: compose once with Hydra, train anywhere with torchrun.

Rooms by layer, each imports from those below: cli, rank | sweep, doctor, archive | launch, training | checkpoint, loader, watchdog |
config, distributed, run_folder, and components by conf group (model, amp, ...) | interfaces | model_log, system, traits | errors, hashing.
"""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

FOLDER = Path(__file__).parent  # where the package lies
CONF = next(path.resolve() for path in (FOLDER / "conf", FOLDER.parent / "conf") if path.is_dir())
"""The config groups, in the installed package (`pkg://ddp_train.conf`); in a checkout the folder is a link to conf/ at the top."""

_FOR_PYTHON = {
    **dict.fromkeys(("run", "RunResult", "RunFailed"), "cli.from_python"),
    "runs": "archive.index",
    "load": "training.inference.finished_run",
    "log": "model_log",
    "draw": "interfaces",
    **dict.fromkeys(("BatchLoss", "Evaluated", "Objective", "Ratio", "TurnObjective"), "interfaces.objective"),
}
"""What programs, notebooks and models use, and where it is defined: imported when it is asked for, so that this package costs nothing."""


def __getattr__(name: str) -> Any:
    if name not in _FOR_PYTHON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FOR_PYTHON[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_FOR_PYTHON]
