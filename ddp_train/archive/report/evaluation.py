"""What a run's saved predictions say: confusion of classes, calibration, the hardest samples, and the answer to each sample."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.packed import Numbers
from ddp_train.run_folder.paths import step_folders

_MAX_CLASSES = 64  # of a confusion matrix
_MAX_ANSWERS = 20_000  # samples whose answers are compared between runs
_BINS = 12
_HARDEST = 24


def evaluation_of(run: ArchivedRun, numbers: Numbers, targets: dict[int, Any], *, with_answers: bool) -> dict[str, Any] | None:
    """Return what the newest predictions of a run say; None: it saved none. Raises OSError, ValueError, EOFError: not readable.

    Args:
        targets: what is to be predicted, by its checksum: gets that of this run, so that runs on the same samples share it.
        with_answers: include each sample's answer.
    """
    folders = step_folders(run.folder.predictions)
    if not folders:
        return None
    step, folder = folders[-1]
    prediction, target, probability, loss = (_load(folder / f"{name}.npy") for name in ("prediction", "target", "probability", "loss"))
    found: dict[str, Any] = {"step": step, "samples": max((len(a) for a in (prediction, target, loss) if a is not None), default=0)}
    if loss is not None and loss.ndim == 1:
        is_skipped = np.isnan(loss)  # a sample that cannot be read, or has no target
        if target is not None and target.shape == loss.shape and target.dtype.kind == "i":
            is_skipped |= target < 0
        order = np.argsort(-np.where(is_skipped, -np.inf, loss), kind="stable")
        hardest = order[~is_skipped[order]][:_HARDEST]
        columns = {"loss": loss, "target": target, "prediction": prediction, "probability": probability}
        shown = {name: values for name, values in columns.items() if values is not None and values.shape == loss.shape}
        found["hardest"] = [{"sample": int(n), **{name: _number(values[n]) for name, values in shown.items()}} for n in hardest]
    if prediction is None or target is None or prediction.shape != target.shape or prediction.dtype.kind != "i" or prediction.size == 0:
        return found
    true, answer = target.ravel().astype(np.int64), prediction.ravel().astype(np.int64)
    is_valid = (true >= 0) & (answer >= 0)
    if not is_valid.any():
        return found
    classes = int(max(true[is_valid].max(), answer[is_valid].max())) + 1
    found |= {"classes": classes, "accuracy": float((true == answer)[is_valid].mean())}
    pairs, counts = np.unique(true[is_valid] * classes + answer[is_valid], return_counts=True)
    if classes <= _MAX_CLASSES:
        found["confusion"] = numbers.add(np.bincount(pairs, counts, minlength=classes * classes))
    wrong = [(int(c), int(p) // classes, int(p) % classes) for p, c in zip(pairs, counts, strict=True) if p // classes != p % classes]
    found["confused"] = sorted(wrong, reverse=True)[:12]
    if probability is not None and probability.shape == target.shape:
        sure = probability.ravel().astype(np.float64)
        has_both = is_valid & (sure >= 0) & (sure <= 1)
        if has_both.any():
            found |= _calibration(true[has_both], answer[has_both], sure[has_both], classes)
    if with_answers and prediction.ndim == 1 and len(true) <= _MAX_ANSWERS:
        key = zlib.crc32(true.tobytes())
        targets.setdefault(key, None)
        targets[key] = targets[key] or numbers.add(true)
        percent = (
            numbers.add(np.round(100 * probability.ravel())) if probability is not None and probability.shape == target.shape else None
        )
        found["answers"] = {"targets": key, "prediction": numbers.add(answer), "percent": percent}
    return found


def _calibration(true: NDArray[Any], answer: NDArray[Any], probability: NDArray[Any], classes: int) -> dict[str, Any]:
    """Return the share of hits by probability, and the expected calibration error. Source: Guo et al. 2017, arXiv:1706.04599."""
    is_of_yes = classes <= 2 and bool((probability < 0.5).any())  # of a yes, not of the prediction
    hit = (true == 1) if is_of_yes else (true == answer)
    bins = np.minimum((probability * _BINS).astype(np.int64), _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    with np.errstate(invalid="ignore"):
        confidence, share = (np.bincount(bins, values, minlength=_BINS) / counts for values in (probability, hit))
    filled = counts > 0
    error = float((np.abs(confidence - share)[filled] * counts[filled]).sum() / counts.sum())
    rows = [(round(float(c), 5), round(float(s), 5), int(n)) for c, s, n in zip(confidence, share, counts, strict=True) if n]
    return {"calibration": rows, "calibration_error": error, "is_of_yes": is_of_yes}


def _load(path: Path) -> NDArray[Any] | None:
    return np.load(path, allow_pickle=False) if path.exists() else None


def _number(value: Any) -> float | int | None:
    number = value.item()
    return round(number, 5) if isinstance(number, float) and np.isfinite(number) else number if isinstance(number, int) else None
