"""The client of a run over SSH: holds a line to each machine, shows what they print, and passes signals on.

Nothing begins before every machine is ready: it is reached, stands in the same folder, sees the run's folder and has the interpreter. What
the first machine prints is the run's own output, and is shown as it is; lines of the others begin with their names.
"""

import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import IO, NamedTuple

from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FAILED, FINAL, EnvironmentRefuses, code_of_signals, printable
from ddp_train.launch.engine.ssh_remote import MARK, READY
from ddp_train.launch.signals import LISTENED
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import exit_code_after_agent
from ddp_train.system import process_env

_BROKEN = 255  # what ssh ends with when it cannot reach a machine, or loses it
_READY_WITHIN_S = 120  # a host key, an authentication, cluster.setup with its modules
_ENDS_ALONE_S = 5  # where a machine cannot take part, the others have so long to end by themselves
_OF_THE_MACHINE = {
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_"),
    *("DISPLAY", "STY", "TMUX", "WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY"),
    *("NNODES", "NODE_RANK", *process_env.OF_TORCHRUN),
    # these mean something to bash
    *("DIRSTACK", "ENV", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "IFS", "LINENO", "OPTIND", "PIPESTATUS"),
    *("POSIXLY_CORRECT", "PPID", "PS1", "PS2", "PS4", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM", "TMOUT", "UID", "launch_id"),
}
_OF_THE_MACHINE_BEGIN = ("BASH", "DBUS_", "PET_", "SLURM", "SSH_", "TORCHELASTIC", "XDG_", process_env.PREFIX)
"""Variables that tell of this machine, of a login or of a shell, and not of the run."""


class Remote(NamedTuple):
    """A machine, and how it is reached and prepared."""

    host: str
    command: Sequence[str]  # starts a bash there that reads commands
    script: str  # what that is told


def run_client(run_folder: RunFolder, remotes: Sequence[Remote], *, least: int) -> int:
    """Run the node programs to their ends, and return the exit code of the run; `least` machines are needed."""
    os.setsid()  # Ctrl-C on the terminal reaches the command, which tells us once
    received, lines = list[int](), list[_SshLine]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for line in lines:
            line.say(f"signal {signal.SIGKILL if number == signal.SIGQUIT else number}")

    for number in LISTENED:
        signal.signal(number, pass_on)
    before = run_folder.read_result()
    launch_id = secrets.token_hex(8)
    marker = run_folder.launch / f"here_{launch_id}"  # who sees it sees the run's folder
    marker.touch()
    try:
        lines += [_SshLine(remote, preamble(os.environ, launch_id), is_first=index == 0) for index, remote in enumerate(remotes)]
        problems = _wait_until_ready(lines, received)
    finally:
        marker.unlink(missing_ok=True)
    for problem in problems:
        print(f"\n{problem}", file=sys.stderr)
    code = DONE
    if problems or received:
        for line in lines:
            line.close()
    else:
        for line in lines:
            line.say(f"go {launch_id}")  # where it comes after a signal, nothing begins there
        code = _wait_until_ended(lines, least)
    if problems:
        print("\nnothing was started", file=sys.stderr)
        return ENVIRONMENT_REFUSES
    if code == DONE and received:
        code = code_of_signals(received)  # where the folder has nothing better
    return exit_code_after_agent(run_folder, code, before=before)


def preamble(environment: Mapping[str, str], launch_id: str) -> bytes:
    """Return the lines that set a machine's environment, of which a login by SSH has nothing, and which launch it is."""
    lines = [
        f"export {name}={shlex.quote(value)}\n"
        for name, value in sorted(environment.items())
        if name.isidentifier() and name.isascii() and name not in _OF_THE_MACHINE and not name.startswith(_OF_THE_MACHINE_BEGIN)
    ]
    return os.fsencode("".join([*lines, f"launch_id={launch_id}\n"]))


class _SshLine:
    def __init__(self, remote: Remote, preamble: bytes, *, is_first: bool) -> None:
        self.host = remote.host
        self.is_ready = threading.Event()
        self._refuses = ""
        self._printed: deque[str] = deque(maxlen=5)  # before it was ready
        self._prefix = b"" if is_first else f"[{remote.host}] ".encode()
        self._words: SimpleQueue[bytes | None] = SimpleQueue()  # a handler of a signal may add to it at any time
        self._words.put(preamble + os.fsencode(remote.script))
        self._ssh = subprocess.Popen(remote.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._ssh.stdin is not None and self._ssh.stdout is not None and self._ssh.stderr is not None
        threading.Thread(target=self._speak, args=(self._ssh.stdin,), daemon=True).start()
        pipes = ((self._ssh.stdout, sys.stdout.buffer), (self._ssh.stderr, sys.stderr.buffer))
        self._shows = [threading.Thread(target=self._show, args=pipe, daemon=True) for pipe in pipes]
        for show in self._shows:
            show.start()

    def say(self, text: str) -> None:
        self._words.put(f"{text}\n".encode())

    def close(self) -> None:
        """Say no more, and wait for the far end, which ends then."""
        self._words.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(_ENDS_ALONE_S)

    def exit_code(self) -> int | None:
        """Return the exit code of the node program, or of ssh itself, when all its output is shown."""
        if self._ssh.poll() is None:
            return None
        for show in self._shows:
            show.join(1)
        return self._ssh.returncode if self._ssh.returncode >= 0 else _BROKEN

    def problem(self) -> EnvironmentRefuses | None:
        if self.is_ready.is_set():
            return None
        code, said = self.exit_code(), "; ".join(self._printed)
        reason, _, fix = self._refuses.partition("; fix: ")
        if not reason and code in (None, _BROKEN):
            reason = f"was not ready within {_READY_WITHIN_S} s" if code is None else "cannot be reached by ssh"
            fix = f"`ssh -o BatchMode=yes {self.host} true` must succeed here; set the machine's name, user and key in ~/.ssh/config"
        elif not reason:
            reason, fix = f"exited with code {code} before the run began", f"`ssh {self.host}`, install what is missing; or cluster.setup"
        return EnvironmentRefuses(key="cluster.hosts", happened=f"{self.host} {reason}" + (f": {said}" if said else ""), fix=fix)

    def _speak(self, stream: IO[bytes]) -> None:
        with suppress(OSError):  # ssh has ended
            while (words := self._words.get()) is not None:
                stream.write(words)
                stream.flush()
        with suppress(OSError):
            stream.close()

    def _show(self, source: IO[bytes], target: IO[bytes]) -> None:
        for line in source:
            if line.startswith(MARK.encode()):
                text = line.decode().rstrip("\r\n")
                if text == READY:
                    self.is_ready.set()
                else:
                    self._refuses = text.removeprefix(f"{MARK}no ")
            elif not self.is_ready.is_set():
                self._printed.append(printable(line.decode(errors="replace").strip()))
            else:
                with suppress(OSError, ValueError):  # nobody reads it any more: the command hears of it in another way
                    target.write(self._prefix + line)
                    target.flush()


def _wait_until_ready(lines: Sequence[_SshLine], received: Sequence[int]) -> list[EnvironmentRefuses]:
    deadline = time.monotonic() + _READY_WITHIN_S
    waits = list(lines)
    while waits and not received and time.monotonic() < deadline:
        waits[0].is_ready.wait(0.1)
        waits = [line for line in waits if not line.is_ready.is_set() and line.exit_code() is None]
        for line in lines:
            if line.is_ready.is_set():
                line.say("alive")
    return [] if received else [problem for line in lines if (problem := line.problem()) is not None]


def _wait_until_ended(lines: Sequence[_SshLine], least: int) -> int:
    """Keep the lines alive until all machines have ended, and return the exit code of the run."""
    stop_at: float | None = None
    while any(line.exit_code() is None for line in lines):
        ended = [line.exit_code() for line in lines if line.exit_code() is not None]
        if stop_at is None and len(lines) - len(ended) < least and any(code not in (DONE, _BROKEN) for code in ended):
            stop_at = time.monotonic() + _ENDS_ALONE_S
        is_late = stop_at is not None and time.monotonic() > stop_at
        for line in lines:
            line.say("alive")
            if is_late:
                line.say(f"signal {signal.SIGTERM}")
        stop_at = float("inf") if is_late else stop_at  # told once
        time.sleep(0.5)
    codes = [line.exit_code() or DONE for line in lines]
    reasons = [code for code in codes if code not in (DONE, _BROKEN)]
    if reasons and codes.count(DONE) < least:
        return next((code for code in reasons if code in FINAL), reasons[0])
    return DONE if DONE in codes else FAILED
