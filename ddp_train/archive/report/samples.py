"""What a run says of samples: its saved predictions, and the images and texts that its callbacks have shown."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.run_folder.paths import step_folders

_MAX_CLASSES = 100  # of a confusion matrix
_MAX_ANSWERS = 20_000  # samples whose answers are compared between runs
_BINS = 12
_ARRAYS = ("target", "prediction", "probability")
_MAX_STEPS = 24  # of an image or a text
_OF_EVERY_RUN = ("config", "_hparams_")  # texts


def predictions_of(run: ArchivedRun, *, with_answers: bool) -> dict[str, Any] | None:
    """Return the content of a run's newest predictions; None: it saved none of classes. Raises OSError, ValueError, EOFError: not readable.

    `with_answers`: include each sample's answer, to be compared with other runs'.
    """
    folders = step_folders(run.folder.predictions)
    if not folders:
        return None
    step, folder = folders[-1]
    arrays = {name: np.load(path, allow_pickle=False) for name in _ARRAYS if (path := folder / f"{name}.npy").exists()}
    arrays = {name: array for name, array in arrays.items() if array.shape == arrays["target"].shape} if "target" in arrays else {}
    if "prediction" not in arrays or arrays["prediction"].dtype.kind != "i":
        return None
    is_answered = (arrays["target"] >= 0) & (arrays["prediction"] >= 0)  # all but samples that cannot be read, or have no target
    if not is_answered.any():
        return None
    target, prediction = (arrays[name][is_answered].astype(np.int64) for name in ("target", "prediction"))
    classes = int(max(target.max(), prediction.max())) + 1
    found: dict[str, Any] = {"step": step, "samples": len(is_answered), "classes": classes}
    found["accuracy"] = float((target == prediction).mean())
    if classes <= _MAX_CLASSES:
        found["confusion"] = np.bincount(target * classes + prediction, minlength=classes**2)
    if with_answers and is_answered.ndim == 1 and len(is_answered) <= _MAX_ANSWERS:
        found["answers"] = {name: np.round(100 * array) if name == "probability" else array for name, array in arrays.items()}
    if "probability" in arrays:
        is_answered &= (arrays["probability"] >= 0) & (arrays["probability"] <= 1)
        found |= _calibration(*(array[is_answered] for array in arrays.values())) if is_answered.any() else {}
    return found


def _calibration(target: NDArray[Any], prediction: NDArray[Any], probability: NDArray[Any]) -> dict[str, Any]:
    """Return the share of hits by probability, and the expected calibration error. Source: Guo et al. 2017, arXiv:1706.04599."""
    is_of_yes = bool(max(target.max(), prediction.max()) < 2 and (probability < 0.5).any())  # of a yes, not of the prediction
    hit = (target == 1) if is_of_yes else (target == prediction)
    bins = np.minimum((probability * _BINS).astype(int), _BINS - 1)
    filled = [bins == number for number in np.unique(bins)]
    rows = [(round(float(probability[at].mean()), 5), round(float(hit[at].mean()), 5), int(at.sum())) for at in filled]
    error = sum(abs(confidence - share) * count for confidence, share, count in rows) / len(bins)
    return {"calibration": rows, "calibration_error": error, "is_of_yes": is_of_yes}


def shown_by(run: ArchivedRun, *, max_bytes: int) -> list[dict[str, Any]]:
    """Return the images and texts of a run's callbacks by name, of evenly chosen steps with the first and the last, within `max_bytes`."""
    found, counts = dict[str, dict[int, str]](), Counter[str]()
    paths = sorted(run.root.glob("tensorboard/**/events.out.tfevents.*")) if run.config.get("callbacks") else []
    for name, step, text in (entry for path in paths for entry in _read_events(path) if len(entry[2]) <= max_bytes):
        counts[name] += 1
        by_step = found.setdefault(name, {})
        by_step[step] = text
        if len(by_step) > 2 * _MAX_STEPS:  # not all of a long run are in memory
            for other in list(by_step)[1::2]:
                del by_step[other]
    shown = []
    for name, by_step in sorted(found.items()):
        most = min(len(by_step), _MAX_STEPS, max_bytes // len(found) // max(map(len, by_step.values())))
        steps = np.array(sorted(by_step))[np.unique(np.linspace(len(by_step) - 1, 0, most).astype(int))].tolist()
        shown.append({"name": name, "of": counts[name], "shown": [{"step": step, "value": by_step[step]} for step in steps]})
    return shown


def _read_events(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the name, step and content of each image and text in a file of TensorBoard's, the only ones that hold them."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    begin = 0
    with suppress(OSError, ValueError), path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as records:
        while begin < len(records):  # each is its length, a checksum, its content, and that one's checksum
            length = int.from_bytes(records[begin : begin + 8], "little")
            content = records[begin + 12 : begin + 12 + length]
            begin += length + 16
            if b"PNG" not in content and b"\x0a\x04text" not in content:
                continue
            with suppress(DecodeError):  # damaged, or half a record, which a kill leaves
                event = Event.FromString(content)
                for value in event.summary.value:
                    if value.HasField("image"):
                        yield value.tag, event.step, "data:image/png;base64," + base64.b64encode(value.image.encoded_image_string).decode()
                    elif value.metadata.plugin_data.plugin_name == "text" and not value.tag.startswith(_OF_EVERY_RUN):
                        text = b"".join(value.tensor.string_val).decode(errors="replace")
                        yield value.tag.removesuffix("/text_summary"), event.step, text
