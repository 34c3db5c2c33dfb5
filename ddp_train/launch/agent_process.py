"""Start a torchrun agent as a child process, pass signals on, and wait for it; and the requests to a fork server.

Agents come from a fork server: an interpreter that imports torch while this process composes and checks. It begins before the command
knows more than its own words (`early_fork_server`), and is ended when it is not needed after all.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ddp_train.errors import INTERRUPTED, TERMINATED
from ddp_train.launch.signals import stop_signals
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.restart_note import STARTED
from ddp_train.system import process_env
from ddp_train.system.folder_lock import descriptors
from ddp_train.system.fork_server import ForkRequest, ForkServer, spawn_fork_server
from ddp_train.system.process import NUM_THREADS, Child, has_free_processor
from ddp_train.system.terminal import free_foot

_AGENT_IMPORTS = ("torch", "ddp_train.launch.agent.main", "ddp_train.rank.main", "ddp_train.rank.forked")
COMPILER = "torch._dynamo"
"""What DDP, most of torch's optimizers and who compiles import. It takes half as long as all that an agent and a rank need without it."""
_OF_EVERY_JOB = ("torch.utils.tensorboard",)  # what each imports late: for many of them once is enough
_server: ForkServer | None = None


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """An agent's own options, in addition to torchrun's."""

    grace_s: int  # `cluster.grace_s`
    run_folder: RunFolder | None = None  # of the run, where the agent has one
    node_rank: int = 0  # of this machine, among several
    in_sweep: bool = False  # the sweep shows failures, and counts them
    restarts: int | None = None  # how often the ranks of several machines were started again; None: this agent counts
    uses_torch_agent: bool = False  # `cluster.agent=torch`: torchrun's own, with nothing of ours in it

    @property
    def is_one_attempt(self) -> bool:
        """Whether the agent is for one attempt on several machines: the first machine decides what follows (`node/attempts.py`)."""
        return self.restarts is not None


@dataclass(frozen=True, kw_only=True)
class AgentRequest(ForkRequest):
    """Be an agent (`launch.agent.main`). Its ranks need the same `imports`, and have none of its `files`."""

    options: AgentOptions
    arguments: list[str]  # torchrun's
    environment: dict[str, str]  # the whole of it


@dataclass(frozen=True, kw_only=True)
class RankRequest(ForkRequest):
    """Be a rank of the agent that asks (`rank.main`)."""

    words: list[str]  # the command line
    environment: dict[str, str]  # the whole of it
    stdout: str  # the file that it goes to; "": where the agent's goes
    stderr: str


@dataclass(frozen=True, kw_only=True)
class CheckRequest(ForkRequest):
    """Check a configuration (`cli.check_process`). `files`: in memory, of the question and of the reply."""


def start_fork_server(*, uses_compiler: bool = False) -> ForkServer:
    """Start to import what an agent and its ranks need, in parallel with this process, unless that has begun; return the fork server.

    `uses_compiler`: import the compiler, too, while nothing is asked for: this process starts several agents, or waits before the first.
    """
    global _server
    if _server is not None and not _server.wait_until_ready():  # it was killed
        stop_fork_server()
    if _server is None:
        environment = {**os.environ, NUM_THREADS: "1"}  # so that it can be forked: OpenBLAS starts its threads when it is loaded
        environment.pop(process_env.CALLER, None)  # it is ours
        _server = spawn_fork_server(environment, [*_AGENT_IMPORTS, COMPILER] if uses_compiler else _AGENT_IMPORTS)
    return _server


@contextmanager
def early_fork_server(words: Sequence[str]) -> Iterator[None]:
    """Start the fork server for a command that will start ranks, before Hydra is imported and the words are read; end it with the block."""
    from ddp_train.config.command.commands import starts_ranks  # which no rank needs

    try:
        if starts_ranks(words) and has_free_processor():  # else it would be in the way, and a wrong key answered later
            start_fork_server()
        yield
    finally:
        stop_fork_server()


def stop_fork_server() -> None:
    """End the process that imports or waits: no agent is needed, or not for a long time."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.end()


def request_check(files: Sequence[int]) -> Child:
    """Let a process that has imported torch check a configuration (`cli.check_process.serve_check`), before it has what an agent needs."""
    return start_fork_server().start(CheckRequest(files=files, imports=["torch"]))


def start_agent_and_wait(options: AgentOptions, arguments: list[str], *, environment: Mapping[str, str], uses_compiler: bool = True) -> int:
    """Start an agent, wait for its end and return its exit code; 130 after Ctrl-C, 143 after another stop signal.

    A stop signal is passed on; a second Ctrl-C or SIGQUIT kills the agent, and with it its ranks. For the arguments see `start_agent`.
    """
    agent = start_agent(options, arguments, environment=environment, is_last=True, uses_compiler=uses_compiler)
    with stop_signals(agent.signal, lambda: agent.signal(signal.SIGKILL)) as received:
        code = agent.wait()
    free_foot(1)  # a rank that was killed has left it
    if received:
        return INTERRUPTED if signal.SIGINT in received else TERMINATED
    if code < 0:
        killer = signal.Signals(-code).name
        print(f"\nThe run failed: its agent (pid {agent.pid}) was ended by {killer}; its ranks ended with it", file=sys.stderr)
    return code if code >= 0 else 128 - code


def start_agent(
    options: AgentOptions,
    arguments: list[str],
    *,
    environment: Mapping[str, str],
    files: Sequence[int] = (),
    is_last: bool = False,
    uses_compiler: bool = True,
) -> Child:
    """Start an agent (`agent.main.become_agent`), which has this process's environment and the locks of its folders.

    Args:
        arguments: torchrun's.
        environment: variables of the ranks, in addition to this process's own.
        files: descriptors that the arguments name.
        is_last: this process starts no other agent.
        uses_compiler: False: its ranks come to their first step without it.
    """
    global _server
    imports = [*_AGENT_IMPORTS, *([COMPILER] if uses_compiler else []), *([] if is_last else _OF_EVERY_JOB)]
    files = [*descriptors(), *files]
    environment = {**os.environ, **environment, process_env.STARTED: str(STARTED)}
    request = AgentRequest(options=options, arguments=arguments, environment=environment, files=files, imports=imports, is_last=is_last)
    agent = start_fork_server().start(request)
    if is_last:
        _server = None
    return agent


def agent_arguments(processes: int, *options: str, max_restarts: int = 0) -> list[str]:
    """Return torchrun's arguments for an agent of one machine."""
    from ddp_train.config.cluster import ALONE  # not before a fork server has begun

    return [*options, *ALONE, f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}", "-m", "ddp_train"]


def rank_environment(processes: int, threads_per_process: int | None) -> dict[str, str]:
    """Return the variables that every rank needs before torch starts: threads that share the cores instead of fighting for them."""
    threads = threads_per_process or max(1, len(os.sched_getaffinity(0)) // processes)
    return {NUM_THREADS: str(threads)} if threads_per_process or NUM_THREADS not in os.environ else {}
