"""Models, data and losses of others: one command each, without code of ours between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Project, metrics
from tests.thirdparty.conftest import needs

SHORT = ["trainer.max_steps=2", "loader.micro_batch_size=4", "evaluation.batch_size=4", "~metrics.tensorboard"]
FAKE = [
    "data=custom",
    "data._target_=torchvision.datasets.FakeData",
    "+data.size=32",
    "+data.image_size=[3,32,32]",
    "+data.transform._target_=torchvision.transforms.ToTensor",
    "+data.eval.random_offset=1000",
]
IMAGES = ["data=custom", "data._target_=torchvision.datasets.ImageFolder", "+data.root=images/train", "+data.eval.root=images/test"]


def write_images(folder: Path) -> None:
    for split, counts in {"train": (12, 4), "test": (4, 4)}.items():
        for label, count in enumerate(counts):
            (folder / "images" / split / str(label)).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((20, 24, 3), 40 * label + number, np.uint8)
                Image.fromarray(pixels).save(folder / "images" / split / str(label) / f"{number}.png")


def small_model(num_classes: int) -> list[str]:
    return ["model=convnet", "model.width=4", "model.image_shape=[3,16,16]", f"model.num_classes={num_classes}"]


@needs("timm", "torchvision")
def test_a_timm_model(train: Callable[..., Path]) -> None:
    train(*SHORT, *FAKE, "model._target_=timm.create_model", "+model.model_name=resnet10t", "model.num_classes=10")


@needs("torchvision")
def test_a_torchvision_model_on_fake_data(train: Callable[..., Path]) -> None:
    run = train(*SHORT, *FAKE, "model._target_=torchvision.models.resnet18", "model.num_classes=10")
    log = (run / "logs" / "rank_00000.log").read_text()
    assert "torchvision.models.resnet18 instead of ConvNet: takes num_classes=10 of its arguments, not image_shape, width, dropout" in log


@needs("torchvision")
def test_an_image_folder_with_v1_transforms_and_one_of_the_evaluation(train: Callable[..., Path], project: Project) -> None:
    write_images(project.folder)
    crop, tensor = "{_target_: torchvision.transforms.RandomResizedCrop, size: 16}", "{_target_: torchvision.transforms.ToTensor}"
    middle = "{_target_: torchvision.transforms.Resize, size: [16, 16]}"
    compose = "torchvision.transforms.Compose"
    own = [
        f"+data.transform={{_target_: {compose}, transforms: [{crop}, {tensor}]}}",
        f"+data.eval.transform.transforms=[{middle}, {tensor}]",
    ]
    run = train(*SHORT, *IMAGES, *own, *small_model(2))
    assert metrics(run, "eval")


@needs("torchvision")
def test_an_image_folder_with_v2_transforms_and_types_sampled_evenly(train: Callable[..., Path], project: Project) -> None:
    write_images(project.folder)
    v2 = "torchvision.transforms.v2"
    to_type = f"{{_target_: {v2}.ToDtype, dtype: '${{object:torch.float32}}', scale: true}}"
    steps = f"[{{_target_: {v2}.ToImage}}, {{_target_: {v2}.RandomCrop, size: 16}}, {to_type}]"
    own = [f"+data.transform={{_target_: {v2}.Compose, transforms: {steps}}}", "loader.sampling=balanced"]
    train(*SHORT, *IMAGES, *own, *small_model(2))


@needs("datasets")
def test_hugging_face_parquet_comes_as_tensors(train: Callable[..., Path], project: Project) -> None:
    import datasets

    rows = {"image": [[float(row % 2)] * 12 for row in range(32)], "label": [row % 2 for row in range(32)]}
    for name in ("train", "test"):
        datasets.Dataset.from_dict(rows).to_parquet(project.folder / f"{name}.parquet")
    data = [
        "data=custom",
        "data._target_=datasets.load_dataset",
        "+data.path=parquet",
        "+data.data_files={train: train.parquet, test: test.parquet}",
    ]
    data += ["+data.split=train", "+data.eval.split=test", "loader.fields=[image,label]"]
    run = train(*SHORT, *data, "model=mlp", "model.image_shape=[1,3,4]", "model.num_classes=2")
    assert metrics(run, "eval")


SHARDS = """
# @package _global_
data:
  _target_: webdataset.WebDataset.to_tuple
  _args_:
    - _target_: webdataset.WebDataset.decode
      _args_: [{_target_: webdataset.WebDataset, urls: "train-{000000..000003}.tar", shardshuffle: 4, seed: 0}, torchrgb]
    - png
    - cls
  eval:
    _args_:
      - _target_: webdataset.WebDataset.decode
        _args_: [{_target_: webdataset.WebDataset, urls: "test-{000000..000001}.tar", shardshuffle: false}, torchrgb]
      - png
      - cls
evaluation:
  every_steps: 2
"""


STAGES = """
# @package _global_
data:
  _target_: webdataset.DataPipeline
  _args_:
    - {_target_: webdataset.SimpleShardList, urls: "train-{000000..000003}.tar", seed: 0}
    - ${object:webdataset.split_by_node}
    - {_target_: webdataset.tarfile_to_samples}
    - {_target_: webdataset.shuffle, bufsize: 4, seed: 0}
    - {_target_: webdataset.decode, _args_: [torchrgb]}
    - {_target_: webdataset.to_tuple, _args_: [png, cls]}
  eval:
    _args_:
      - {_target_: webdataset.SimpleShardList, urls: "test-{000000..000001}.tar"}
      - ${object:webdataset.split_by_node}
      - {_target_: webdataset.tarfile_to_samples}
      - {_target_: webdataset.decode, _args_: [torchrgb]}
      - {_target_: webdataset.to_tuple, _args_: [png, cls]}
evaluation:
  every_steps: 2
"""


@needs("webdataset")
@pytest.mark.parametrize("shards", [SHARDS, STAGES], ids=["chain", "stages"])
def test_a_webdataset_pipeline(train: Callable[..., Path], project: Project, shards: str) -> None:
    import webdataset

    for split, count in (("train", 32), ("test", 9)):
        with webdataset.ShardWriter(str(project.folder / f"{split}-%06d.tar"), maxcount=8, verbose=0) as writer:
            for number in range(count):
                writer.write({"__key__": f"{number:04d}", "png": np.full((16, 16, 3), number, np.uint8), "cls": number % 2})
    project.write("mine/data/shards.yaml", shards)
    run = train(*SHORT, "--config-dir=mine", "data=shards", "loader.num_workers=1", *small_model(2))
    assert metrics(run, "eval")


PADDED = """
import torch
class Ragged(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index): return torch.full((1 + index % 12,), 1.0), index % 2
def pad(samples):
    inputs = torch.nn.utils.rnn.pad_sequence([each for each, _ in samples], batch_first=True)
    return torch.nn.functional.pad(inputs, (0, 12 - inputs.shape[1])), torch.tensor([label for _, label in samples])
"""


def test_a_collate_function_that_pads(train: Callable[..., Path], project: Project) -> None:
    project.write("my_padded.py", PADDED)
    assert len(PADDED.strip().splitlines()) <= 8
    data = ["data=custom", "data._target_=my_padded.Ragged", "+loader.collate._target_=my_padded.pad", "loader.num_workers=1"]
    train(*SHORT, *data, "model=mlp", "model.image_shape=[1,3,4]", "model.num_classes=2")


def test_a_loss_function_and_a_loss_class(train: Callable[..., Path]) -> None:
    for loss in ("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss"):
        train(*SHORT, f"objective._target_={loss}", "data.num_samples=64")
