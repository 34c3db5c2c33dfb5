from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.samples import predictions_of, shown_by
from tests.unit.archive.report.run_files import write_run


def save(run: Path, **arrays: object) -> ArchivedRun:
    folder = run / "predictions/step_00000010"
    folder.mkdir(parents=True)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    return ArchivedRun(run)


def test_confusion_calibration_and_answers(tmp_path: Path) -> None:
    run = save(tmp_path, target=[0, 1, 2, 2], prediction=[0, 1, 1, 2], probability=[0.9, 0.9, 0.6, 0.6])
    found = predictions_of(run, with_answers=True)
    assert found is not None and (found["step"], found["samples"], found["classes"], found["accuracy"]) == (10, 4, 3, 0.75)
    assert found["confusion"].reshape(3, 3).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert found["calibration"] == [(0.6, 0.5, 2), (0.9, 1.0, 2)] and found["calibration_error"] == pytest.approx(0.1)
    assert {name: values.tolist() for name, values in found["answers"].items()} == {
        "target": [0, 1, 2, 2],
        "prediction": [0, 1, 1, 2],
        "probability": [90, 90, 60, 60],
    }


def test_of_two_classes_the_probability_is_that_of_a_yes(tmp_path: Path) -> None:
    found = predictions_of(save(tmp_path, target=[0, 1], prediction=[0, 1], probability=[0.1, 0.9]), with_answers=False)
    assert found is not None and found["is_of_yes"] and found["calibration"] == [(0.1, 0.0, 1), (0.9, 1.0, 1)]


def test_a_run_without_predictions_of_classes_has_no_evaluation(tmp_path: Path) -> None:
    assert predictions_of(ArchivedRun(tmp_path), with_answers=True) is None
    assert predictions_of(save(tmp_path / "text", loss=[0.5, 2.0], tokens=[3, 4]), with_answers=True) is None
    assert predictions_of(save(tmp_path / "no target", target=[-1, -1], prediction=[-1, -1]), with_answers=True) is None


def test_samples_that_were_skipped_count_nowhere(tmp_path: Path) -> None:
    """An unreadable one has target and prediction -1 and no number, an ignored one target -100."""
    nan = float("nan")
    run = save(tmp_path, target=[0, 1, -1, -100], prediction=[0, 0, -1, 1], probability=[0.9, 0.6, nan, 0.9])
    found = predictions_of(run, with_answers=True)
    assert found is not None and (found["accuracy"], found["calibration"]) == (0.5, [(0.6, 0.0, 1), (0.9, 1.0, 1)])


def test_a_probability_for_other_samples_is_left_out(tmp_path: Path) -> None:
    found = predictions_of(save(tmp_path, target=[0, 1], prediction=[0, 1], probability=[0.5]), with_answers=True)
    assert found is not None and "calibration" not in found and list(found["answers"]) == ["target", "prediction"]


def test_images_and_texts_are_read_from_tensorboard_s_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", callbacks={"sample_images": {}})
    with SummaryWriter(str(run / "tensorboard")) as writer:
        writer.add_text("config", "not this one")
        for step in range(30):
            writer.add_scalar("train/loss", 1.0, step)
            writer.add_image("samples/inputs", torch.rand(3, 16, 16), step)
            writer.add_text("samples/text", f"text of step {step}", step)
    file = next((run / "tensorboard").glob("events*"))
    file.write_bytes(file.read_bytes() + b"\x20\0\0\0\0\0\0\0half a record")
    shown = {entry["name"]: entry for entry in shown_by(ArchivedRun(run), max_bytes=20_000)}
    assert list(shown) == ["samples/inputs", "samples/text"]
    images, texts = shown["samples/inputs"]["shown"], shown["samples/text"]["shown"]
    assert images[0]["value"].startswith("data:image/png;base64,") and 1 < len(images) < 30 == shown["samples/inputs"]["of"]
    assert (images[0]["step"], images[-1]["step"], texts[-1]) == (0, 29, {"step": 29, "value": "text of step 29"})
    assert sum(len(image["value"]) for image in images) <= 10_000
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("sample_images: {}", ""))
    assert shown_by(ArchivedRun(run), max_bytes=20_000) == []


def test_a_damaged_record_is_left_out_and_few_images_are_in_memory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", callbacks={"sample_images": {}})
    with SummaryWriter(str(run / "tensorboard")) as writer:
        for step in range(200):
            writer.add_image("samples/inputs", torch.rand(3, 60, 60), step)
    file = next((run / "tensorboard").glob("events*"))
    content = bytearray(file.read_bytes())
    content[content.index(b"samples/inputs") - 1] = 0xFF  # the length of its name
    file.write_bytes(content)
    tracemalloc.start()
    (inputs,) = shown_by(ArchivedRun(run), max_bytes=60_000)
    assert tracemalloc.get_traced_memory()[1] < len(content) / 2
    tracemalloc.stop()
    steps = [image["step"] for image in inputs["shown"]]
    assert inputs["of"] == 199 and (len(steps), steps[0], steps[-1]) == (4, 1, 199)
