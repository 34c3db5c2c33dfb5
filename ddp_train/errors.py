"""Errors that a person can act on: what happened, what was expected, how to fix it, and the config key.

Lowest layer: everything may raise these. They are shown without a traceback, because the message is the answer.
"""

from __future__ import annotations

from ddp_train.exit_code import ENVIRONMENT_REFUSES, FAILED, WRONG_INPUT
from ddp_train.redaction import printable


class UserError(Exception):
    """Something the user can mend: shown as one block, without a traceback.

    Args:
        happened: what was found.
        expected: what should have been there.
        fix: what to type or change.
        key: the config key to look at, when there is one (`data.root`).
    """

    exit_code = WRONG_INPUT
    """Of a run that it ends. One of `exit_code.FINAL` says that starting again would end the same way."""

    def __init__(self, *, happened: str, expected: str = "", fix: str = "", key: str = "") -> None:
        super().__init__(happened, expected, fix, key)  # positional, so that pickling (data-loader workers) keeps all four
        self.happened, self.expected, self.fix, self.key = happened, expected, fix, key

    def __reduce__(self) -> tuple[object, ...]:
        fields = {"happened": self.happened, "expected": self.expected, "fix": self.fix, "key": self.key}
        return _rebuild, (type(self), fields)

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.happened}" if self.key else self.happened]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return printable("\n".join(lines))


class ConfigError(UserError):
    """The configuration is wrong; nothing was started (exit code 2)."""


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


def _rebuild(cls: type[UserError], fields: dict[str, str]) -> UserError:
    return cls(**fields)
