"""Errors that a person can act on: what happened, what was expected, how to fix it, and the config key.

Lowest layer: everything may raise these. They are shown without a traceback, because the message is the answer.
"""

import errno
import signal
from collections.abc import Collection, Iterable, Sequence
from functools import partial

DONE = 0
FAILED = 1
WRONG_INPUT = 2  # something that a person has to mend: the command line, the config, the data
PREEMPTED = 75  # stopped by a signal or before the walltime ends, saved: run it again
ENVIRONMENT_REFUSES = 78  # do not run it again before something is mended
NO_PROGRESS = 93  # started again and again without getting further: do not run it again before something is mended
INTERRUPTED = 130  # stopped by Ctrl-C
TERMINATED = 143  # stopped by a signal before there was anything to save
STOPPED = (PREEMPTED, INTERRUPTED)  # in good order

DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""The `errno` of a disk that is full or takes no more: the exit code is `ENVIRONMENT_REFUSES`."""
FINAL = (WRONG_INPUT, ENVIRONMENT_REFUSES, NO_PROGRESS)  # what a rank exits with when starting it again would end the same way
_BYTE_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def code_of_signals(signals: Collection[int]) -> int:
    """Return the exit code of a command that stop signals have ended, where no result.json says more."""
    return INTERRUPTED if signal.SIGINT in signals else TERMINATED


def shell_code(code: int) -> int:
    """Return the exit code of a child as a shell writes it: 128 + N for -N, which says in Python that signal N has ended it."""
    return code if code >= 0 else 128 - code


class UserError(Exception):
    """Something the user can mend: shown as one block, without a traceback.

    Args:
        happened: what was found.
        expected: what should have been there.
        fix: what to type or change.
        key: the config key to look at, when there is one (`data.root`). A component gives `.decay` for its argument: who calls it knows
            under which key it is (`put_under`).
    """

    exit_code = WRONG_INPUT
    """Of a run that it ends. One of `FINAL` says that starting again would end the same way."""

    def __init__(self, *, happened: str, expected: str = "", fix: str = "", key: str = "") -> None:
        super().__init__(happened, expected, fix, key)
        self.happened, self.expected, self.fix, self.key = happened, expected, fix, key

    def __reduce__(self) -> tuple[object, ...]:  # for loader workers; without it the fields would be passed by position
        return partial(type(self), happened=self.happened, expected=self.expected, fix=self.fix, key=self.key), ()

    def put_under(self, key: str) -> None:
        """Put the config key of the component that raised the error before the argument that it names; a whole key stays."""
        if not self.key or self.key.startswith("."):
            self.key = f"{key}{self.key}"

    def __str__(self) -> str:
        head = f"{self.key}: {self.happened}" if self.key else self.happened
        rest = [f"\n  {name}: {text}" for name, text in (("expected", self.expected), ("fix", self.fix)) if text]
        return printable("".join([head, *rest]))


class ConfigError(UserError):
    """The configuration is wrong; nothing was started (exit code 2)."""


class ConfigErrors(UserError):
    """Every problem of a configuration, to be shown together."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = list(errors)
        super().__init__(happened=self.text())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errors,)

    def text(self, *, has_begun: bool = False) -> str:
        """Return the text for the terminal. `has_begun`: earlier jobs have run."""
        started = "no other job was started" if has_begun else "nothing was started"
        return "\n\n".join([f"{plural(len(self.errors), 'problem')} in the configuration; {started}.", *map(str, self.errors)])


def conflict(key: str, happened: str, to: object, *, expected: str = "one of the two") -> ConfigError:
    """Return the error for a key whose value excludes another one; `key=to` is the fix."""
    return ConfigError(key=key, happened=happened, expected=expected, fix=f"{key}={to}")


class DataError(UserError):
    """A data file is missing, foreign or damaged."""


class EnvironmentRefuses(UserError):
    """The machine does not let the run begin."""

    exit_code = ENVIRONMENT_REFUSES


class RunError(UserError):
    """Something that went wrong while the run trained; from its newest checkpoint it may go well."""

    exit_code = FAILED


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite."""


def printable(text: str) -> str:
    """Return text that a terminal shows and does not obey: control characters, but for line ends and tabs, are spelled out."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def one_line(text: str, most: int) -> str:
    """Return a text as one line, cut after so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def join_few(texts: Sequence[str], most: int = 8) -> str:
    """Return the first texts, and how many others there are: `a, b and 3 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def plural(number: int, noun: str) -> str:
    """Return a number and its noun: `1 job`, `2 jobs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def readable_size(num_bytes: int) -> str:
    """Write a number of bytes in the largest unit that leaves a whole part."""
    power = min(len(_BYTE_UNITS) - 1, (len(str(num_bytes)) - 1) // 3)
    return f"{num_bytes / 1000**power:.{1 if power else 0}f} {_BYTE_UNITS[power]}"
