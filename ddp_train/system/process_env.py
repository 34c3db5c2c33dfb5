"""The environment variables of a process: ours, by which it hands something to another; torchrun's, of a rank; SLURM's, of a step.

Nothing else reads these. `config/cluster.py` reads those for the agent itself (PET_*, and MASTER_ADDR where a cluster sets it). A user's
settings are in the config. SLURM's batch script has most variables of a step, too, and is no task of one.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

PREFIX = "DDP_TRAIN_"  # what all of ours begin with
JOB = "DDP_TRAIN_JOB"  # for an agent's ranks: the file with the job that was composed for them, as JSON; the agent is asked with its text
AGENT = "DDP_TRAIN_AGENT"  # for the processes of an agent of ours: its pid. It may be gone when they have imported torch
NODE = "DDP_TRAIN_NODE"  # for the ranks of a run over several machines: the pid of this machine's node program, which outlives their agents
FACTS = "DDP_TRAIN_FACTS"  # for ranks of the doctor on several machines: the file with their node program's facts, as JSON; as JOB
STARTED = "DDP_TRAIN_STARTED"  # for the ranks of our own agents: when `ddp-train` was typed, in seconds since the epoch
PLACE = "DDP_TRAIN_PLACE"  # for the ranks of a sweep's job that have members: their place in the store
FORK_SERVER = "DDP_TRAIN_FORK_SERVER"  # for a fork server: the descriptor of its socket to its owner, and the owner's pid
LOADER_RANK = "DDP_TRAIN_RANK"  # for the server that loader workers are forked from: its rank's pid
CALLER = "DDP_TRAIN_CALLER"  # for a `ddp-train` started from Python: that process's pid, and the descriptor of the file for the outcome
ONE_GPU = "DDP_TRAIN_ONE_GPU"
"""For tests/gpu, which may have one GPU: `group` opens a process group for one rank, too; `shared` lets all ranks of a machine use its
first GPU, over gloo, as NCCL refuses two ranks on one."""
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torchrun overwrites these for each rank."""
_FIRST_OF_SLURMS_OWN = 0xFFFFFF00  # steps with such numbers are the batch script, an interactive shell and the like


def shares_gpu() -> bool:
    """Tell whether all ranks of a machine use its first GPU."""
    return os.environ.get(ONE_GPU) == "shared"


def is_torchrun_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a torchrun agent started the process with this environment (by default this one).

    RANK alone does not say so: a Kubernetes operator sets it for the whole pod.
    """
    return "TORCHELASTIC_RUN_ID" in environment and "LOCAL_RANK" in environment


def _number(variable: str, default: str | None = None) -> int:
    return int(os.environ[variable] if default is None else os.environ.get(variable, default))


rank = partial(_number, "RANK")  # this process's place among all ranks
world_size = partial(_number, "WORLD_SIZE")  # how many ranks there are
local_rank = partial(_number, "LOCAL_RANK")  # this process's place among the ranks of its node
local_world_size = partial(_number, "LOCAL_WORLD_SIZE")  # how many ranks this node has
node_rank = partial(_number, "GROUP_RANK", "0")  # this node's place among all nodes; an agent is a node, and one machine may run several
num_nodes = partial(_number, "GROUP_WORLD_SIZE")  # how many nodes there are
restart_count = partial(_number, "TORCHELASTIC_RESTART_COUNT", "0")  # how often this node's agent has started its ranks again
max_restarts = partial(_number, "TORCHELASTIC_MAX_RESTARTS", "0")  # how often it does so at most


def is_last_attempt() -> bool:
    """Tell whether this node's agent has no restart left, so that a failure now is the run's."""
    return restart_count() >= max_restarts()


def error_file() -> str:
    """Return the file in which torch's agent looks for this rank's error; "": there is none."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def joining_hangs(agent: str, environment: Mapping[str, str]) -> bool:
    """Tell whether torch 2.13 waits for ever when a machine joins the run of the torchrun with this command line."""
    nodes = re.search(r"--nnodes[= ](\d+):(\d+)", agent) or re.fullmatch(r"(\d+):(\d+)", environment.get("PET_NNODES", ""))
    return nodes is not None and nodes[1] != nodes[2] and environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"


def store_address() -> tuple[str, int]:
    """Return the host and the port of the store in which the ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def agent_serves_store() -> bool:
    """Tell whether the agent serves that store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One step of a SLURM job, from a task's environment."""

    id: str  # job, step, and how often the job was started again: unique to this launch
    node_rank: int  # this node's place among those of the step
    hosts: tuple[str, ...]
    most_tasks: int  # on one node
    is_typed_in: bool = False  # its first task is a shell with a terminal


def slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the step that started this process; None: no step did."""
    number, hosts = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NODELIST", "")
    if not number.isdigit() or int(number) >= _FIRST_OF_SLURMS_OWN or not hosts:
        return None
    job, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT") or "0"
    tasks = [int(part) for part in re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))]
    return SlurmStep(
        id=f"{job}.{number}.{restarts}",
        node_rank=int(environment.get("SLURM_NODEID", "0")),
        hosts=tuple(hosts_of(hosts)),
        most_tasks=max(tasks),
        is_typed_in="SLURM_PTY_PORT" in environment,
    )


def hosts_of(text: str) -> Iterator[str]:
    """Return the hosts that `node[01-03,7],login` means, as `scontrol show hostnames` does."""
    return chain.from_iterable(map(_expanded, re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)))


def _expanded(part: str) -> Iterator[str]:
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, after = rest.partition("]")
    for span in numbers.split(","):
        low, dash, high = span.partition("-")
        for number in range(int(low), int(high if dash else low) + 1):
            yield from (f"{prefix}{number:0{len(low)}}{end}" for end in _expanded(after))
