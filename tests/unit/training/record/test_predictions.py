"""Per-sample outputs of an evaluation: in the data set's order, complete or not there."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_train.distributed.world import alone
from ddp_train.loader.dataset_adapter import DatasetSource
from ddp_train.loader.loader import PositionedEvaluationLoader
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.supervised import LossObjective
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.parts.components import Components
from ddp_train.training.record.predictions import PredictionFiles, forget_after
from tests.unit.parts import components
from tests.unit.training.ragged import Ragged


def evaluated(parts: Components, folder: Path, **changes: Any) -> dict[str, float] | None:
    return evaluate(parts, alone(), predictions=lambda name: folder / name, **changes)


def test_each_sample_has_its_row_and_they_say_what_the_metrics_say(tmp_path: Path) -> None:
    parts = components("evaluation.batch_size=8")  # 101 = 12 x 8 + 5
    assert parts.eval_loader is not None
    metrics = evaluated(parts, tmp_path / "step_00000003")
    found = {path.stem: np.load(path, mmap_mode="r") for path in (tmp_path / "step_00000003").iterdir()}
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "prediction": ("int64", (101,)),
        "target": ("int64", (101,)),
        "probability": ("float32", (101,)),
        "loss": ("float32", (101,)),
        "accuracy": ("bool", (101,)),
        "accuracy_top5": ("bool", (101,)),
    }
    images, labels = (torch.cat(columns) for columns in zip(*(micro_batch.batch for micro_batch in parts.eval_loader), strict=True))
    with torch.no_grad():
        logits = parts.model.eval()(images)
    assert found["prediction"].tolist() == logits.argmax(dim=1).tolist()
    assert found["target"].tolist() == labels.tolist()
    assert metrics is not None
    assert float(np.mean(found["prediction"] == found["target"])) == metrics["accuracy"]
    assert float(np.mean(found["loss"])) == pytest.approx(metrics["loss"], rel=1e-6)
    assert found["probability"].tolist() == pytest.approx(logits.softmax(dim=1).amax(dim=1).tolist(), rel=1e-5)


def test_a_language_model_tells_the_loss_and_the_tokens_of_each_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
    loader = PositionedEvaluationLoader(Ragged(), rank=0, world_size=1, batch_size=5)
    parts = replace(components(), model=model, objective=LanguageModeling(ignore_index=-100), eval_loaders={"": loader})
    metrics = evaluated(parts, tmp_path / "p")
    losses, tokens = np.load(tmp_path / "p/loss.npy"), np.load(tmp_path / "p/tokens.npy")
    assert tokens.tolist() == [sample % 6 for sample in range(12)]
    assert losses[0] == 0.0
    assert metrics is not None
    assert losses.sum() / tokens.sum() == pytest.approx(metrics["loss"], rel=1e-6)


def test_a_bare_loss_function_saves_what_the_model_gave_also_in_bfloat16(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    source = DatasetSource(TensorDataset(torch.rand(7, 3), torch.zeros(7, 2)))
    loader = PositionedEvaluationLoader(source, rank=0, world_size=1, batch_size=4)
    parts = replace(components("amp=bf16"), model=model, objective=LossObjective(torch.nn.functional.mse_loss), eval_loaders={"": loader})
    evaluated(parts, tmp_path / "p")
    output = np.load(tmp_path / "p/output.npy")
    assert (output.dtype, output.shape) == (np.float32, (7, 2))


def test_an_evaluation_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    assert evaluated(components(), tmp_path / "step_00000003", is_stopping=lambda: True) is None
    assert list(tmp_path.iterdir()) == []


def test_the_same_evaluation_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for seed in (0, 1):
        evaluated(components(f"seed={seed}"), tmp_path / "step_00000003")
        last = np.load(tmp_path / "step_00000003/loss.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    evaluated(components("seed=1"), tmp_path / "other")
    assert np.array_equal(last, np.load(tmp_path / "other/loss.npy"))


def test_a_full_disk_is_an_error_and_nothing_half_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = os.pwrite, list[int]()

    def fills_up(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with pytest.raises(OSError, match=r"step_00000003 was not saved \(evaluation.save_predictions\).*rank 0.*No space left"):
        evaluated(components("evaluation.batch_size=8"), tmp_path / "step_00000003")
    assert list(tmp_path.iterdir()) == []


def test_samples_that_were_skipped_have_rows_that_say_so(tmp_path: Path) -> None:
    files = PredictionFiles(tmp_path / "p", alone(), num_samples=6, first=0)
    files.add({"loss": torch.ones(2), "prediction": torch.ones(2, dtype=torch.int64)}, skips=[1])
    files.add({"loss": torch.ones(0), "prediction": torch.ones(0, dtype=torch.int64)}, skips=[3, 4])
    files.add({"loss": torch.ones(1), "prediction": torch.ones(1, dtype=torch.int64)})
    files.close(keep=True)
    assert np.load(tmp_path / "p/prediction.npy").tolist() == [1, -1, 1, -1, -1, 1]
    assert np.isnan(np.load(tmp_path / "p/loss.npy")).tolist() == [False, True, False, True, True, False]


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    files = PredictionFiles(tmp_path / "p", alone(), num_samples=4, first=0)
    files.add({"loss": torch.zeros(2)})
    with pytest.raises(ValueError, match="the same names, types and shapes"):
        files.add({"loss": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="one row per sample"):
        files.add({"loss": torch.zeros(2), "prediction": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"rows \(2,\) by rank.*expected 4"):
        files.close(keep=True)
    assert list(tmp_path.iterdir()) == []


def test_each_set_has_a_folder_of_its_own(tmp_path: Path) -> None:
    parts = components("+evaluation.sets.few={num_samples: 3}", "evaluation.save_predictions=true")
    evaluate(parts, alone(), predictions=partial(RunFolder(tmp_path).predictions_of, 4))
    rows = {path.parent.relative_to(tmp_path): len(np.load(path)) for path in tmp_path.rglob("loss.npy")}
    assert rows == {Path("predictions/step_00000004"): 101, Path("predictions/few/step_00000004"): 3}
    forget_after(tmp_path / "predictions", 3)
    assert not list(tmp_path.rglob("*.npy"))


def test_what_an_attempt_left_beyond_its_last_checkpoint_goes(tmp_path: Path) -> None:
    for name in ("step_00000004", "step_00000008", ".partial_step_00000004", "notes"):
        (tmp_path / name).mkdir()
    forget_after(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_00000004"]


def test_predictions_of_a_step_with_more_digits_are_later_ones(tmp_path: Path) -> None:
    for name in ("step_99999999", "step_100000000"):
        (tmp_path / name).mkdir()
    forget_after(tmp_path, 99_999_999)
    assert [path.name for path in tmp_path.iterdir()] == ["step_99999999"]


def test_predictions_of_no_evaluation_are_refused() -> None:
    with pytest.raises(Exception, match=r"evaluation.save_predictions: is true, but data.eval is null"):
        components("evaluation.save_predictions=true", "data.eval=null", base=["model=mlp"])
