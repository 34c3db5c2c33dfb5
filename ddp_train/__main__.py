"""`ddp-train` and `python -m ddp_train`: how this process was started, and which part it takes. `=>` begins a new process:

   `_run_command` -> `cli.main` -> `cli.compose` -> `launch.local`: the typed command; `ddp-train node` is one, too
=> `system.fork_server`: imports torch meanwhile, and is what it is asked to be (`run_request`); a clone of it waits for the next request
=> `launch.agent.main`: the agent of this machine
=> `rank.main` -> `rank.rank` -> `rank.train_job` -> `Trainer.train`: one for each device; torchrun starts such a process itself
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

try:
    from ddp_train.errors import FAILED, INTERRUPTED
    from ddp_train.launch.fork_requests import COMPILER, AgentRequest, CheckRequest, RankRequest, early_fork_server
    from ddp_train.launch.signals import keep_early_stops
    from ddp_train.system import process_env, terminal
    from ddp_train.system.fork_server import import_for_good, run_fork_server
    from ddp_train.system.process import die_with_parent, exit_at_once, exit_with, restrict_new_files
    from ddp_train.system.process_env import is_torchrun_worker, world_size
except KeyboardInterrupt:  # `_run_command` handles a later one
    sys.exit(130)

if TYPE_CHECKING:
    from ddp_train.launch.job_runner import CommandLine


def main() -> None:
    """Become what this process was started for, and exit with its code."""
    terminal.open_closed_streams()
    restrict_new_files()
    if process_env.FORK_SERVER in os.environ:
        terminal.protect_streams()
        imports = sys.argv[1:]
        del sys.argv[1:]  # they are the fork server's, not its forks'
        exit_with(lambda: run_fork_server(partial(run_request, loaded_with=dict(os.environ)), imports))
    if is_torchrun_worker():
        _become_rank_under_torchrun()
    sys.exit(_run_command())


def run_request(request: AgentRequest | RankRequest | CheckRequest, *, loaded_with: Mapping[str, str]) -> int:
    """Do what a fork server was asked for, in the process that was asked.

    `loaded_with`: the environment in which the fork server has imported.
    """
    match request:
        case AgentRequest():
            from ddp_train.launch.agent.main import become_agent

            return become_agent(request, loaded_with=loaded_with, become_rank=_become_forked_rank)
        case RankRequest():
            return _become_forked_rank(request)
        case CheckRequest():
            from ddp_train.cli.check_process import serve_check

            return serve_check(request)


def _become_forked_rank(request: RankRequest) -> NoReturn:
    from ddp_train.rank.forked import setup_forked_rank

    setup_forked_rank(request)
    terminal.protect_streams()
    _become_rank(request.words)


def _become_rank_under_torchrun() -> NoReturn:
    """Become a rank in an interpreter that torchrun, or an agent of ours that could not fork, has started."""
    terminal.protect_streams()
    # Before torch is imported, which takes seconds in which the agent may be killed. Popped: what a job starts has another parent.
    die_with_parent(int(os.environ.pop(process_env.AGENT, "0")))
    # While torch is imported and the ranks meet, a stop ends this process without a traceback; then the rank handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import_for_good(["ddp_train.rank.main", *([COMPILER] if world_size() > 1 else [])])  # which DDP imports
    _become_rank(sys.argv[1:])


def _become_rank(words: Sequence[str]) -> NoReturn:
    from ddp_train.rank.main import main as rank_main

    exit_at_once(rank_main(_load_cli, words))


def _load_cli() -> "CommandLine":
    from ddp_train.cli import main as cli  # and Hydra with it, which a rank that is given its job does without

    return cli


def _run_command() -> int:
    if sys.argv[1:2] == ["node"]:
        keep_early_stops()  # before what takes its time to import
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before anything imports torch, which reads it then
    atexit.register(gc.freeze)  # Python would look through all that was imported once more: with torch a third of a second
    try:
        with early_fork_server.begun_for(sys.argv[1:]), terminal.protected_streams():
            try:
                from ddp_train.cli.main import main as run_typed_command

                return run_typed_command()
            except Exception:
                sys.excepthook(*sys.exc_info())  # while the streams show no secrets
                return FAILED
    except KeyboardInterrupt:  # while this was imported
        return INTERRUPTED


if __name__ == "__main__":
    main()
