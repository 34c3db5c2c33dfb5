from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.evaluation import evaluation_of
from ddp_train.archive.report.packed import Numbers


def save(run: Path, **arrays: object) -> ArchivedRun:
    folder = run / "predictions/step_00000010"
    folder.mkdir(parents=True)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    return ArchivedRun(run)


def test_confusion_calibration_and_hardest_samples(tmp_path: Path) -> None:
    run = save(tmp_path, target=[0, 1, 2, 2], prediction=[0, 1, 1, 2], probability=[0.9, 0.9, 0.6, 0.6], loss=[0.1, 0.1, 3.0, 0.5])
    numbers, targets = Numbers(), {}
    found = evaluation_of(run, numbers, targets, with_answers=True)
    assert found is not None and (found["step"], found["samples"], found["classes"], found["accuracy"]) == (10, 4, 3, 0.75)
    begin, length = found["confusion"]
    assert np.concatenate(numbers._arrays)[begin : begin + length].reshape(3, 3).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert found["calibration"] == [(0.6, 0.5, 2), (0.9, 1.0, 2)] and found["calibration_error"] == pytest.approx(0.1)
    assert [row["sample"] for row in found["hardest"]] == [2, 3, 0, 1]
    again = evaluation_of(run, numbers, targets, with_answers=True)
    assert again is not None and len(targets) == 1 and again["answers"]["targets"] == found["answers"]["targets"]


def test_of_two_classes_the_probability_is_that_of_a_yes(tmp_path: Path) -> None:
    found = evaluation_of(save(tmp_path, target=[0, 1], prediction=[0, 1], probability=[0.1, 0.9]), Numbers(), {}, with_answers=False)
    assert found is not None and found["is_of_yes"] and found["calibration"] == [(0.1, 0.0, 1), (0.9, 1.0, 1)]


def test_losses_alone_are_enough_for_hardest_samples(tmp_path: Path) -> None:
    found = evaluation_of(save(tmp_path, loss=[0.5, 2.0], tokens=[3, 4]), Numbers(), {}, with_answers=True)
    assert found == {"step": 10, "samples": 2, "hardest": [{"sample": 1, "loss": 2.0}, {"sample": 0, "loss": 0.5}]}


def test_a_run_without_predictions_has_no_evaluation(tmp_path: Path) -> None:
    assert evaluation_of(ArchivedRun(tmp_path), Numbers(), {}, with_answers=True) is None


def test_samples_that_were_skipped_count_nowhere(tmp_path: Path) -> None:
    """An unreadable one has target and prediction -1 and no number, an ignored one target -100."""
    nan = float("nan")
    run = save(tmp_path, target=[0, 1, -1, -100], prediction=[0, 0, -1, 1], probability=[0.9, 0.6, nan, 0.9], loss=[0.1, 2.0, nan, 9.0])
    found = evaluation_of(run, Numbers(), {}, with_answers=True)
    assert found is not None and (found["accuracy"], found["calibration"]) == (0.5, [(0.6, 0.0, 1), (0.9, 1.0, 1)])
    assert [row["sample"] for row in found["hardest"]] == [1, 0]


def test_arrays_of_unequal_length_and_without_a_valid_target_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    run = save(tmp_path, target=[-1, -1], prediction=[-1, -1], probability=[0.5], loss=[0.5, 0.25, 0.75])
    found = evaluation_of(run, Numbers(), {}, with_answers=True)
    assert found == {"step": 10, "samples": 3, "hardest": [{"sample": n, "loss": loss} for n, loss in ((2, 0.75), (0, 0.5), (1, 0.25))]}
