"""`ddp-train` and `python -m ddp_train`: the one way in, typed by a person, started by torchrun on every rank, or by ourselves to wait."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

try:
    from ddp_train.errors import FAILED, INTERRUPTED
    from ddp_train.launch import agent_process
    from ddp_train.launch.node import early
    from ddp_train.system import handover, terminal
    from ddp_train.system.nursery import wait_in_nursery
    from ddp_train.system.process import be_private, die_with_parent, exit_at_once, has_free_processor
    from ddp_train.system.torchrun_env import is_torchrun_worker, world_size
except KeyboardInterrupt:  # `main` handles a later one
    sys.exit(130)

if TYPE_CHECKING:
    from ddp_train.launch.launcher import Launcher

_TRAIN = ("resume", "evaluate", "predict", "doctor")
"""The commands that start ranks, beside the one without a name."""

_HERE = ("cluster=local", "cluster=cpu")
"""Presets whose ranks are processes of this machine. A login node, from which jobs go elsewhere, has few processors to give."""

_TELL = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
"""What asks for text alone."""

_loaded_with: dict[str, str] = {}  # the environment when the imports began


def main() -> None:
    """Run the command line and exit with its code."""
    terminal.open_closed()
    if sys.argv[1:2] == ["node"]:
        early.keep()  # before what takes its time to import
    be_private()
    if handover.NURSERY in os.environ:
        terminal.outlive()
        exit_at_once(_tell(lambda: wait_in_nursery(_load, _become, pauses_at=agent_process.RANKS)))
    if is_torchrun_worker():
        terminal.outlive()
        # Before torch is imported, which takes seconds in which the agent may be killed. Popped: what a job starts has another parent.
        die_with_parent(int(os.environ.pop(handover.AGENT, "0")))
        # While torch is imported and the ranks meet, a stop ends this process without a traceback; then the rank handles it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for name in _load():
            if name == agent_process.RANKS and world_size() == 1:
                break  # DDP alone needs what follows
        _be_rank()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before anything imports torch, which reads it then
    atexit.register(gc.freeze)  # Python would look through all that was imported once more: with torch a third of a second
    try:
        if starts_ranks(sys.argv[1:]) and has_free_processor():  # else it would be in the way, and a wrong key answered later
            agent_process.expect_agents()
        with terminal.outlived():
            try:
                from ddp_train.cli import caller
                from ddp_train.cli import main as cli

                caller.find()
                code = cli.main()
            except Exception:  # told here, where no secret is shown
                sys.excepthook(*sys.exc_info())
                code = FAILED
    except KeyboardInterrupt:  # while this was imported
        code = INTERRUPTED
    finally:
        agent_process.expect_none()
    sys.exit(code)


def starts_ranks(words: list[str]) -> bool:
    """Tell, as far as the words show it, whether a command comes to start ranks on this machine when nothing is wrong with it.

    Where they do not show it, what ranks need is imported when they are started.
    """
    is_command = bool(words) and "=" not in words[0] and words[0][:1] not in ("-", "+", "~")
    is_told = any(word.partition("=")[0] in _TELL for word in words)
    is_elsewhere = any(word.startswith(("cluster=", "cluster.launcher=")) and word not in _HERE for word in words)
    return not is_told and not is_elsewhere and (not is_command or words[0] in _TRAIN)


def _load() -> Generator[str, None, None]:
    """Import what agents and ranks need, and yield the name of each part of it."""
    _loaded_with.update(os.environ)
    gc.disable()  # what these imports make stays: to look through it again and again takes a fifth of their time
    try:
        for name in agent_process.IMPORTED:
            importlib.import_module(name)
            yield name
    finally:
        gc.freeze()
        gc.enable()


def _become(request: dict[str, Any]) -> int:
    """Be the agent that this process is asked to be, or the rank, or check a configuration: in a nursery, whose imports are done."""
    if "rank" in request:
        return _be_forked_rank(request)
    if "check" in request:
        from ddp_train.cli import check_there

        return check_there.answer(*request["files"])
    from ddp_train.launch.agent.main import be_agent

    return be_agent(request, _be_forked_rank, loaded_with=_loaded_with)


def _be_forked_rank(request: Mapping[str, Any]) -> NoReturn:
    from ddp_train.rank import forked

    forked.become(request["rank"])
    os.environ.pop(handover.AGENT, None)  # it is tied to it already
    terminal.outlive()
    _be_rank()


def _be_rank() -> NoReturn:
    from ddp_train.rank import main as rank

    exit_at_once(rank.main(run=_run, resume=_resume))


def _run(launcher: Launcher) -> int:
    from ddp_train.cli import main as cli  # Hydra, which a rank that is given its job does not need

    return cli.run(launcher)


def _resume(folder: Path, launcher: Launcher) -> int:
    from ddp_train.cli import main as cli

    return cli.resume(folder, launcher)


def _tell(work: Callable[[], int]) -> int:
    """Return what `work` does; tell what goes wrong, where no secret is shown."""
    try:
        return work()
    except Exception:
        sys.excepthook(*sys.exc_info())
        return FAILED


if __name__ == "__main__":
    main()
