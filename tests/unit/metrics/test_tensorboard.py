"""TensorBoard: scalars, the config, and the jobs of a sweep told apart."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.tensorboard
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ddp_train.metrics.tensorboard import TensorBoard
from ddp_train.run_folder.sweep import Sweep, SweepJob
from tests.unit.metrics.records import record


def test_tensorboard_has_scalars_config_and_hyper_parameters(tmp_path: Path) -> None:
    writer = TensorBoard(str(tmp_path), {"optimizer": {"lr": 0.1}, "name": "x", "trainer": {"max_steps": None}}, {"optimizer.lr": 0.1})
    writer.write(record(5, loss=1.5))
    writer.write(record(5, "eval", accuracy=0.75))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("train/loss")[0].step == 5
    assert events.Scalars("eval/accuracy")[0].value == 0.75
    assert b"optimizer" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    started = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert set(HParamsPluginData.FromString(started).session_start_info.hparams) == {"optimizer.lr"}


def test_the_jobs_of_a_sweep_can_be_told_apart_in_tensorboard(tmp_path: Path) -> None:
    sweep = Sweep(root=tmp_path, command=[], keys=["optimizer.lr", "model"])
    for number, lr in enumerate(("0.1", "0.2")):
        overrides = ["seed=3", f"optimizer.lr={lr}", "model=mlp"]
        sweep.jobs.append(SweepJob(number=number, folder=str(number), overrides=overrides, identity=lr))
        run = tmp_path / str(number)
        TensorBoard(str(run), {}, run_name=sweep.name(run)).close()
    names = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("events.*")}
    assert names == {"0/tensorboard/optimizer.lr=0.1,model=mlp", "1/tensorboard/optimizer.lr=0.2,model=mlp"}
    TensorBoard(str(tmp_path), {}, run_name="data.root=/a/b").close()
    TensorBoard(str(tmp_path), {}, run_name="é" * 200).close()
    assert (tmp_path / "tensorboard/data.root=_a_b").is_dir()


def test_what_hinders_its_opening_is_raised_by_the_first_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", refuse)
    writer = TensorBoard(str(tmp_path), {})
    with pytest.raises(OSError, match="No space left"):
        writer.write(record(5, loss=1.5))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):  # what the folder hinders is told at once
        TensorBoard(str(tmp_path / "file"), {})


def picture(tmp_path: Path, image: torch.Tensor) -> np.ndarray:
    writer = TensorBoard(str(tmp_path), {})
    writer.write_image("a", image, step=1)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    return np.asarray(Image.open(io.BytesIO(events.Images("a")[0].encoded_image_string)))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_read_back_as_it_was(tmp_path: Path, channels: int) -> None:
    image = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    assert np.array_equal(picture(tmp_path, image), image.expand(3, 5, 7).permute(1, 2, 0).numpy())


def test_floats_are_clamped_and_what_is_no_number_is_black(tmp_path: Path) -> None:
    found = picture(tmp_path, torch.tensor([[[-1.0, 0.5, 2.0, float("nan")]]]))
    assert found[..., 0].tolist() == [[0, 128, 255, 0]]
