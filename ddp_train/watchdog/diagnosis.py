"""Which rank is to blame for a hang: by the kernel's state, the heartbeats and the stacks of one machine's ranks, in that order.

A rank that waits in a collective waits for another rank. On a GPU the device waits in the collective, and the host stops wherever it needs
its device. Pure functions: the watchdog (`watchdog/__main__.py`) gathers the facts.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from traceback import FrameSummary

from ddp_train.run_folder import failure
from ddp_train.run_folder.failure import Failure, FailureKind
from ddp_train.system import stack_dump
from ddp_train.system.phase import Phase
from ddp_train.watchdog.client import Heartbeat

_BACKWARD = "torch/autograd/graph.py"
_WAITS = ("torch/distributed/", "torch/nn/parallel/", _BACKWARD, *stack_dump.FILES_THAT_WAIT)
"""Files of the innermost frame of a rank that waits for others; in backward, DDP reduces the gradients."""
_READS = ("ddp_train/data/", "ddp_train/loader/")  # in the stack of a rank that reads samples itself, except these files:
_READS_NOTHING = ("ddp_train/loader/loader.py", "ddp_train/loader/device_copy.py")
_USES_DEVICE = (Phase.STEP, Phase.EVALUATION, Phase.SAVE)
_READING = (Phase.DATA, Phase.EVALUATION)
_ERROR = "Hang"
STOPPED = ("T", "t")
IN_KERNEL = "D"


@dataclass(frozen=True, kw_only=True)
class LoaderWorker:
    pid: int
    state: str  # the kernel's letter
    reads: str  # from its note; "": nothing
    frames: Sequence[FrameSummary] = ()


@dataclass(frozen=True, kw_only=True)
class RankView:
    rank: int
    pid: int
    state: str  # the kernel's letter
    heartbeat: Heartbeat
    still_s: float  # seconds without a move
    frames: Sequence[FrameSummary]  # its main thread's, outermost first; empty: it gave no answer
    workers: Sequence[LoaderWorker] = ()
    uses_device: bool = False  # a GPU, for which the host waits in other lines
    is_in_native_code: bool = False  # its main thread does not return to Python: it may wait for its GPU there

    def doing(self) -> str:
        if self.state in STOPPED:
            return "stopped"
        if self.heartbeat.waits_for_device:
            return "waits for its GPU"
        return stack_dump.describe_stack(self.frames) or ("in the kernel" if self.state == IN_KERNEL else "gave no answer")


@dataclass(frozen=True, kw_only=True)
class Culprit:
    view: RankView
    why: str
    fix: str = ""  # "": advice for any hang
    worker_frames: Sequence[FrameSummary] = ()  # shown instead of the rank's own


def find_culprits(ranks: Sequence[RankView], overdue: Sequence[int]) -> list[Culprit]:
    """Return the ranks of `overdue` that are to blame; none if each of them may be waiting for another rank."""
    accusations = [accusation for view in ranks if view.rank in overdue for accusation in _accusations(view, ranks)]
    gravest = min((priority for priority, _ in accusations), default=0)
    return [culprit for priority, culprit in accusations if priority == gravest]


def _accusations(view: RankView, ranks: Sequence[RankView]) -> Iterator[tuple[int, Culprit]]:
    """Yield the reasons why a rank may be to blame, each with its priority, 0 first: the kernel's state comes before stacks."""
    heartbeat, waits = view.heartbeat, _waits(view)
    if view.state in STOPPED:
        why = "is stopped" if view.state == "T" else "is stopped by a debugger"
        yield 0, Culprit(view=view, why=why, fix=f"the code is not the cause: SIGSTOP was sent to process {view.pid}")
    if view.state == IN_KERNEL:
        fix = "check this machine's disks, network file systems and GPUs"
        yield 0, Culprit(view=view, why="waits inside the kernel", fix=fix)
    if not waits and not _waits_for_device(view):
        halted = [worker for worker in view.workers if worker.state in (*STOPPED, IN_KERNEL)]
        suspects = halted or [worker for worker in view.workers if worker.reads]
        if heartbeat.phase in _READING and suspects:
            worker = suspects[0]
            state = "stopped" if worker.state in STOPPED else "waiting inside the kernel" if worker.state == IN_KERNEL else "stuck"
            reading = f" while it reads {worker.reads}" if worker.reads else ""
            why = f"waits for its loader worker (pid {worker.pid}), which is {state}{reading}"
            yield 1, Culprit(view=view, why=why, worker_frames=worker.frames)
        if heartbeat.progress != max(other.heartbeat.progress for other in ranks):  # the foremost has no reason to wait for others
            yield 2, Culprit(view=view, why="is behind the others")
        yield 3, Culprit(view=view, why="hangs")
    # A host in native code that has not launched all work of the step in which other devices wait for its device.
    waiting_step = max((other.heartbeat.device_step for other in ranks if other.heartbeat.waits_for_device), default=-1)
    is_in_backward = len(view.frames) > 0 and _BACKWARD in view.frames[-1].filename  # perhaps in Python code of autograd's thread
    if (not waits or is_in_backward) and heartbeat.step <= waiting_step:
        yield 4, Culprit(view=view, why=f"has not launched all of step {waiting_step + 1} on its GPU, in which the others' GPUs wait")
    # A device that has not finished a step that another one has finished.
    if heartbeat.waits_for_device and heartbeat.device_step < max(other.heartbeat.device_step for other in ranks):
        why = f"waits for its GPU, which hangs in step {heartbeat.device_step + 1}; others finished that step"
        fix = "find a kernel that does not end or a broken GPU: nvidia-smi and dmesg (Xid) on that machine"
        yield 5, Culprit(view=view, why=why, fix=fix)


def find_any_culprit(ranks: Sequence[RankView]) -> Culprit:
    """Pick a rank when all seem to wait: one of the few that wait in another place than most, or the first that stopped."""
    if all(_waits_for_device(view) for view in ranks):  # in any line: each has launched all the work that it could
        last = min(ranks, key=lambda view: view.heartbeat.progress)
        fix = "torchfrtrace on logs/flight_recorder_rank_* names the rank that is missing from a collective; nvidia-smi and dmesg (Xid)"
        return Culprit(view=last, why="waits for its GPU, like all ranks; no host process is the cause", fix=fix)
    by_place: dict[object, list[RankView]] = {}
    for view in ranks:
        by_place.setdefault((view.heartbeat.progress, view.doing()), []).append(view)
    groups = sorted(by_place.values(), key=len)
    if len(groups) > 1 and len(groups[0]) < len(groups[1]):
        fix = "look for a collective that not all ranks take part in"
        return Culprit(view=groups[0][0], why="waits in a different place than the other ranks", fix=fix)
    first = min(ranks, key=lambda view: view.heartbeat.time)
    fix = "look for collectives that the ranks call in different orders"
    return Culprit(view=first, why="stopped first; all ranks wait for each other", fix=fix)


def suspect_other_machine(ranks: Sequence[RankView]) -> Culprit:
    """Return the first rank as a stand-in for another machine: all ranks here wait for ranks there, and it has not reported."""
    first = min(ranks, key=lambda view: view.rank)
    why = "waits, like all ranks of this machine, for another machine, which gave no reason"
    return Culprit(view=first, why=why, fix="check the other machines and the network between them")


def to_failure(culprits: Sequence[Culprit], ranks: Sequence[RankView], *, limit_s: float) -> Failure:
    """Describe a hang, for failure.json and the screen; `limit_s` is the time-out of the first culprit."""
    first, view = culprits[0], culprits[0].view
    key = "cluster.step_timeout_s" if view.heartbeat.has_taken_a_step else "cluster.start_timeout_s"
    frames = first.worker_frames or view.frames
    also = f" (so do ranks {', '.join(str(culprit.view.rank) for culprit in culprits[1:])})" if len(culprits) > 1 else ""
    where = f": {text}" if (text := stack_dump.describe_stack(frames)) else ""
    message = f"rank {view.rank} {first.why}{also}{where}; it has not moved for {view.still_s:.1f} s ({key} is {limit_s:g}),"
    message += f" in the phase {view.heartbeat.phase}"
    stack = failure.shorten(frames) if frames else ""
    hang = Failure(
        kind=FailureKind.HANG,
        rank=view.rank,
        host=socket.gethostname(),
        pid=view.pid,
        step=view.heartbeat.step,
        error=_ERROR,
        message=message,
        key=key,
        traceback=f"{stack}{_ERROR}: {message}" if stack else "",
        time=time.time(),
        fix=first.fix or f"check that line; or set a larger {key} if it was only slow, null to wait forever",
    )
    guilty = {culprit.view.rank for culprit in culprits}
    return hang.with_others({view.rank: f"{view.doing()} (phase {view.heartbeat.phase})" for view in ranks if view.rank not in guilty})


def _waits(view: RankView) -> bool:
    """Tell whether a rank waits for others, by its stack."""
    innermost = next((frame.filename for frame in reversed(view.frames) if not stack_dump.is_polling(frame)), "")
    return any(path in innermost for path in _WAITS)


def _waits_for_device(view: RankView) -> bool:
    """Tell whether a rank may be waiting for its device, which may be waiting for others.

    Then it is inside native code, in any line that gives the device work or reads a result. Hanging Python code is not, and neither is a
    library that reads samples.
    """
    if not view.uses_device or view.heartbeat.phase not in _USES_DEVICE:
        return False
    files = [frame.filename for frame in view.frames if not frame.filename.endswith(_READS_NOTHING)]
    reads = any(path in file for file in files for path in _READS)
    return view.heartbeat.waits_for_device or (view.is_in_native_code and not reads)
