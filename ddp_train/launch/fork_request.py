"""What is asked of a fork server: to be an agent, a rank, or a check."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_train.system.fork_server import Request


@dataclass(frozen=True, kw_only=True)
class AgentRequest(Request):
    """Be an agent (`launch.agent.main`). Its ranks need the same `imports`, and have none of its `files`."""

    arguments: list[str]
    environment: dict[str, str]  # the whole of it


@dataclass(frozen=True, kw_only=True)
class RankRequest(Request):
    """Be a rank of the agent that asks (`rank.main`)."""

    words: list[str]  # the command line
    environment: dict[str, str]  # beside that of the agent
    stdout: str  # the file that it goes to; "": where the agent's goes
    stderr: str


@dataclass(frozen=True, kw_only=True)
class CheckRequest(Request):
    """Check a configuration (`cli.check_process`). `files`: in memory, of the question and of the answer."""
