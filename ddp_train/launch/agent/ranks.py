"""Where an agent gets its ranks from: forked from a process that has imported what they need, and has one thread.

The agent itself has threads, of the store that it serves. Where the ranks' environment has something that is read when an interpreter,
torch or what they stand on is loaded, that process is a fresh interpreter: it imports once for all ranks, and for those after a restart.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from ddp_train.launch.fork_requests import RankRequest
from ddp_train.system import process_env
from ddp_train.system.deadline import wait_until
from ddp_train.system.fork_server import ForkServer, RequestHandler, fork_as_server, interpreter, spawn_fork_server
from ddp_train.system.process import NUM_THREADS, Child, num_threads

_READ_LATER = (process_env.PREFIX, "HYDRA_", "NCCL_", "FI_", "GLOO_", "MASTER_", "PET_", "CUDA_VISIBLE_DEVICES")
"""How variables begin that nothing reads before a rank has begun: for its job, when CUDA starts, or the process group opens."""


def loads_alike(environment: Mapping[str, str], loaded_with: Mapping[str, str]) -> bool:
    """Tell whether Python, torch and their libraries load alike in two environments."""
    differ = {name for name in {*environment, *loaded_with} if environment.get(name) != loaded_with.get(name)}
    if NUM_THREADS in differ and environment.get(NUM_THREADS, "").isdigit():
        differ.remove(NUM_THREADS)  # a number can be set later, too
    return all(name.startswith(_READ_LATER) for name in differ)


class Ranks:
    """The ranks of one agent, which `become_rank` when they are forked. Made before the agent has any thread.

    `files`: descriptors of the agent's, and no rank's. `is_forked`: this process has the `imports`, in their environment (`loads_alike`).
    """

    def __init__(self, become_rank: RequestHandler, *, files: Sequence[int], imports: Sequence[str], is_forked: bool) -> None:
        self.to_start: int | None = None
        """How many ranks it starts in all, where that is known: the last one leaves nothing that waits."""
        self._server: ForkServer | None = None
        if num_threads() > 1:  # the interpreter's own start has begun one (sitecustomize): each rank is a fresh one then
            return
        if is_forked:
            self._server = fork_as_server(become_rank, without=files)
        else:  # with one thread: OpenBLAS would start its own when it is loaded; each rank sets its number afterwards (`rank/forked.py`)
            one = {NUM_THREADS: "1"} if os.environ.get(NUM_THREADS, "1").isdigit() else {}
            self._server = spawn_fork_server({**os.environ, **one}, imports)

    def start(self, entrypoint: str, args: tuple[Any, ...], env: dict[str, str], stdout: str, stderr: str, **others: Any) -> Any:
        """Start one rank and return its handler, in the place of torch's `get_subprocess_handler`, whose arguments these are."""
        python, words = interpreter(), [entrypoint, *map(str, args)]
        can_fork = words[: len(python)] == python and not others.get("numa_options")
        if not can_fork or self._server is None or not self._server.wait_until_ready():
            return get_subprocess_handler(entrypoint, args, env, stdout, stderr, **others)
        if self.to_start is not None:
            self.to_start -= 1
        words, environment = words[len(python) :], {**os.environ, **env}
        request = RankRequest(words=words, environment=environment, stdout=stdout, stderr=stderr, is_last=self.to_start == 0)
        return _Forked(self._server.start(request))

    def end(self) -> None:
        if self._server is not None:
            self._server.end()


class _Forked:
    """A forked rank in a session of its own, with the methods of torch's `SubprocessHandler` and of the `Popen` in that (`proc`)."""

    def __init__(self, child: Child) -> None:
        self.proc, self.pid, self._child = self, child.pid, child
        self.is_closed = False

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self.is_closed = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)

    def poll(self) -> int | None:
        return self._child.exit_code()

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and not wait_until(lambda: self.poll() is not None, within_s=timeout, every_s=0.005):
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._child.wait()
