"""What is asked of a fork server: to be an agent, a rank, or a check."""

from dataclasses import dataclass
from pathlib import Path

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.fork_server import ForkRequest


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """An agent's own options, in addition to torchrun's."""

    grace_s: int  # `cluster.grace_s`
    run_folder: RunFolder | None = None  # of the run, where the agent has one
    group: Path | None = None  # of the members of a sweep (`handover.GROUP`)
    log: Path | None = None  # where torch's own lines go; None: into the run folder
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
