"""A stack in words: what a rank is doing, and the lines of a traceback that tell a person most."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from ddp_train import FOLDER

_FRAMES_KEPT = 8  # the innermost ones of a traceback, in failure.json
_CALL_WRAPPERS = ("torch/nn/modules/module.py", "torch/nn/parallel/distributed.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")
FILES_THAT_WAIT = ("ddp_train/distributed/", "ddp_train/rank/stop.py", "ddp_train/rank/peers.py", "ddp_train/system/deadline.py")
"""Parts of the paths of our files in which a rank waits for others: what they were called for is of interest."""
_ACTIVITIES = {  # part of the path of a library's innermost file -> the activity
    "torch/autograd/": "in backward",
    "multiprocessing/connection.py": "waiting for data",
    "torch/distributed/": "in a collective",
    "torch/nn/modules/": "in forward",
    "torch/optim/": "in the optimizer's step",
}


def describe(frames: Sequence[traceback.FrameSummary]) -> str:
    """Describe a stack in one line: the activity, and the innermost line that is not a library's."""
    activity = next((name for frame in reversed(frames) for path, name in _ACTIVITIES.items() if path in frame.filename), "")
    innermost = next((frame for frame in reversed(frames) if _is_own(frame.filename)), None)
    where = f"{Path(innermost.filename).name}:{innermost.lineno} in {innermost.name}" if innermost else ""
    return ", ".join(text for text in (activity, where) if text)


def user_line(error: BaseException) -> str:
    """Return the innermost line of an error's stack in the user's code, else in ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    users = [frame for frame in frames if not frame.filename.startswith(str(FOLDER))]
    frame = (users or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"


def shorten(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format frames without those in which torch only passes a call on. The rank's log has them all."""
    informative = [frame for frame in frames if not frame.filename.endswith(_CALL_WRAPPERS)] or frames
    return "".join(["Traceback (most recent call last, shortened):\n", *traceback.format_list(informative[-_FRAMES_KEPT:])])


def fit(text: str, num_lines: int) -> list[str]:
    """Return the lines of a traceback, its last frames alone where they are more than `num_lines`; at least two frames."""
    lines = [line for line in text.rstrip().splitlines() if line.strip(" ^~")]
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    kept = next((index for index in frames[:-2] if len(lines) - index + 1 <= num_lines), frames[-2] if len(frames) > 1 else 1)
    return lines[:1] + lines[kept:] if frames else lines


def _is_own(filename: str) -> bool:
    """Tell whether a source file is the user's or ours, not a library's; ours that wait for others do not count."""
    if any(part in filename for part in FILES_THAT_WAIT):
        return False
    is_library = filename.startswith((sysconfig.get_path("stdlib"), "<")) or "/site-packages/" in filename or "/dist-packages/" in filename
    return filename.startswith(str(FOLDER)) or not is_library
