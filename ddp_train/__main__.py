"""`ddp-train` and `python -m ddp_train`: the one way in, typed by a person or started by torchrun on every rank."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys

from ddp_train.errors import FAILED
from ddp_train.launch.node import early
from ddp_train.system import handover, terminal
from ddp_train.system.process import be_private, die_with_parent, exit_at_once
from ddp_train.system.torchrun_env import is_torchrun_worker


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:2] == ["node"]:
        early.keep()  # before what takes its time to import
    be_private()
    if is_torchrun_worker():
        terminal.outlive()
        # While torch is imported and the ranks meet, a stop ends this process without a traceback; then the rank handles it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Before torch is imported, which takes seconds in which the agent may be killed. Popped: what a job starts has another parent.
        die_with_parent(int(os.environ.pop(handover.AGENT, "0")))
        gc.disable()  # what these imports make stays: to look through it again and again takes a fifth of their time
        from ddp_train.cli import main as cli
        from ddp_train.rank import main as rank  # imports torch

        importlib.import_module("torch._dynamo")  # torch's first optimizer would
        gc.freeze()
        gc.enable()
        exit_at_once(rank.main(run=cli.run, resume=cli.resume))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before anything imports torch, which reads it then: agents are forked from here
    with terminal.outlived():
        try:
            from ddp_train.cli import caller
            from ddp_train.cli import main as cli

            caller.find()
            code = cli.main()
        except Exception:  # told here, where no secret is shown
            sys.excepthook(*sys.exc_info())
            code = FAILED
    sys.exit(code)


if __name__ == "__main__":
    main()
