"""What a process that has imported torch is asked to be: a check, an agent, a rank; and the fork server of a command, which is asked.

It imports while the command composes and checks, from before the command knows more than its own words (`EarlyForkServer.begun_for`).
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ddp_train.errors import code_of_signals, shell_code
from ddp_train.launch.restart_note import STARTED
from ddp_train.launch.signals import stop_signals
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system import process_env
from ddp_train.system.folder_lock import descriptors
from ddp_train.system.fork_server import ForkRequest, ForkServer, spawn_fork_server
from ddp_train.system.process import NUM_THREADS, Child, has_free_processor
from ddp_train.system.terminal import free_foot

_AGENT_IMPORTS = ("torch", "ddp_train.launch.agent.main", "ddp_train.rank.main", "ddp_train.rank.forked")
COMPILER = "torch._dynamo"
"""What DDP, most of torch's optimizers and who compiles import. It takes half as long as all that an agent and a rank need without it."""
_OF_EVERY_JOB = ("torch.utils.tensorboard",)  # what each imports late: for many of them once is enough


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


class EarlyForkServer:
    """The fork server of this process: it imports before anything is asked for, and is begun again when it is needed once more."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    def begin(self, *, uses_compiler: bool = False) -> ForkServer:
        """Start to import what an agent and its ranks need, in parallel with this process, unless that has begun.

        `uses_compiler`: import the compiler, too, while nothing is asked for: this process starts several agents, or waits before one.
        """
        if self._server is not None and not self._server.wait_until_ready():  # it was killed
            self.end()
        if self._server is None:
            environment = {**os.environ, NUM_THREADS: "1"}  # so that it can be forked: OpenBLAS starts its threads when it is loaded
            environment.pop(process_env.CALLER, None)  # it is ours
            self._server = spawn_fork_server(environment, [*_AGENT_IMPORTS, COMPILER] if uses_compiler else _AGENT_IMPORTS)
        return self._server

    @contextmanager
    def begun_for(self, words: Sequence[str]) -> Iterator[None]:
        """Begin for a command that will start ranks, before Hydra is imported and the words are read; end with the block."""
        from ddp_train.config.command.commands import starts_ranks  # which no rank needs

        try:
            if starts_ranks(words) and has_free_processor():  # else it would be in the way, and a wrong key answered later
                self.begin()
            yield
        finally:
            self.end()

    def start(self, request: ForkRequest) -> Child:
        """Let the fork server serve a request, and return that process; a request that `is_last` leaves no server."""
        child = self.begin().start(request)
        if request.is_last:
            self._server = None
        return child

    def end(self) -> None:
        """End the process that imports or waits: no agent is needed, or not for a long time."""
        server, self._server = self._server, None
        if server is not None:
            server.end()


early_fork_server = EarlyForkServer()


def start_agent_and_wait(options: AgentOptions, arguments: list[str], *, environment: Mapping[str, str], uses_compiler: bool = True) -> int:
    """Start an agent, wait for its end and return its exit code; 130 after Ctrl-C, 143 after another stop signal.

    A stop signal is passed on; a second Ctrl-C or SIGQUIT kills the agent, and with it its ranks. For the arguments see `start_agent`.
    """
    agent = start_agent(options, arguments, environment=environment, is_last=True, uses_compiler=uses_compiler)
    with stop_signals(agent.signal, lambda: agent.signal(signal.SIGKILL)) as received:
        code = agent.wait()
    free_foot(1)  # a rank that was killed has left it
    if received:
        return code_of_signals(received)
    if code < 0:
        killer = signal.Signals(-code).name
        print(f"\nThe run failed: its agent (pid {agent.pid}) was ended by {killer}; its ranks ended with it", file=sys.stderr)
    return shell_code(code)


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
    imports = [*_AGENT_IMPORTS, *([COMPILER] if uses_compiler else []), *([] if is_last else _OF_EVERY_JOB)]
    files = [*descriptors(), *files]
    environment = {**os.environ, **environment, process_env.STARTED: str(STARTED)}
    request = AgentRequest(options=options, arguments=arguments, environment=environment, files=files, imports=imports, is_last=is_last)
    return early_fork_server.start(request)
