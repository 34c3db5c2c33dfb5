"""What could differ between save and resume, or between a run and its use, is compared: the order, the data and what its numbers mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_train.checkpoint.save import Saver
from ddp_train.config import auto
from ddp_train.distributed.world import alone
from ddp_train.errors import DataError, UserError
from ddp_train.interfaces import Indices
from ddp_train.loader.dataset_adapter import as_source
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training.build.build import build, build_evaluation
from ddp_train.training.inference.finished_run import load
from ddp_train.training.state import data_identity
from ddp_train.training.state.checkpoints import resumed_checkpoint
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.conftest import FEW
from tests.unit.data_files import write_text
from tests.unit.parts import checked, components, saved
from tests.unit.training.finished import finished

IMAGES = ["trainer.global_batch_size=32"]


def code_of(error: UserError) -> str:
    return error.fix.rpartition("=")[2]


def resumed(folder: Path, *overrides: str, base: list[str] | None = None) -> list[str] | None:
    config = checked(*overrides, **({} if base is None else {"base": base}))
    parts, run_folder = build(config, alone()), RunFolder(folder)
    checkpoint = resumed_checkpoint(run_folder, None, alone(), on_progress=lambda: None)
    return data_identity.require_same_data(checkpoint, parts.data_identity, alone(), config) if checkpoint else None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("data.num_samples=320", "data.samples: 640 -> 320"),
        ("data.noise=0.25", "data.noise: 0.5 -> 0.25"),
        ("data.seed=3", "data.key:"),
        ("trainer.global_batch_size=16", "trainer.global_batch_size: 32 -> 16"),
        ("trainer.batch_size_schedule={5: 64}", "trainer.batch_size_schedule: None -> "),
        ("loader.drop_last=true", "loader.drop_last: False -> True"),
        ("loader.sampling=balanced", "loader.sampling: shuffled -> balanced"),
        ("debug.overfit=true", "debug.overfit: False -> True"),
    ],
)
def test_another_order_or_other_data_is_refused_with_both_values(change: str, named: str, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 4, components(*IMAGES))
    with pytest.raises(UserError) as refused:
        resumed(tmp_path, *IMAGES, change)
    assert named in refused.value.happened and refused.value.key == "resume"
    accept = f"accept_changed_data={code_of(refused.value)}"
    accepted = resumed(tmp_path, *IMAGES, change, accept)
    assert accepted is not None and any(line.startswith(named) for line in accepted)
    with pytest.raises(UserError, match="was saved with different data"):  # a code is of one change
        resumed(tmp_path, *IMAGES, "seed=2", accept)


@pytest.mark.parametrize(
    "change",
    [
        *("loader.micro_batch_size=8", "loader.num_workers=1", "trainer.max_epochs=20", "optimizer.lr=0.1"),
        *("evaluation.batch_size=7", "data.eval.num_samples=50", "trainer.log_every_steps=3"),
    ],
)
def test_what_leaves_the_order_alone_needs_no_word(change: str, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 4, components(*IMAGES))
    assert resumed(tmp_path, *IMAGES, change) == []


def test_weights_of_samples_and_users_samplers_are_known_by_what_they_draw(tmp_path: Path) -> None:
    weights = np.ones(640)
    np.save(tmp_path / "weights.npy", weights)
    weighted = [*IMAGES, "loader.sampling=weighted", f"loader.sample_weights={tmp_path}/weights.npy"]
    saved(tmp_path / "checkpoints", 4, components(*weighted))
    assert resumed(tmp_path, *weighted) == []
    weights[-1] = 2
    np.save(tmp_path / "weights.npy", weights)
    with pytest.raises(UserError, match=r"loader\.sample_weights"):
        resumed(tmp_path, *weighted)


MIXTURE = [
    *FEW[2:],
    *("data=mixture", "model=mlp", "model.width=16", "data.eval=null", "trainer.global_batch_size=32"),
    "+data.sources.a={weight: 1, data: {_target_: ddp_train.data.synthetic_images.SyntheticImages, num_samples: 64}}",
]
SECOND = "+data.sources.b={weight: %s, data: {_target_: ddp_train.data.synthetic_images.SyntheticImages, num_samples: %s}}"


@pytest.mark.parametrize(
    ("other", "named"), [((2, 32), "b.weight: 1.0 -> 2.0"), ((1, 31), "b.samples: 32 -> 31"), (None, "b.weight: 1.0 -> None")]
)
def test_a_mixture_is_known_by_its_sources(other: Any, named: str, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 4, components(SECOND % (1, 32), base=MIXTURE))
    with pytest.raises(UserError) as refused:
        resumed(tmp_path, *([SECOND % other] if other else []), base=MIXTURE)
    assert f"data.sources.{named}" in refused.value.happened


def char_text(path: Path, *more: str) -> list[str]:
    own = ["data=char_text", f"data.path={path}", "data.context_length=8", "objective=language_modeling", "model=gpt", "model.width=16"]
    return [*own, "model.num_layers=1", "model.num_heads=2", "trainer.global_batch_size=8", *FEW[2:], *more]


def test_a_vocabulary_is_that_of_the_run(tmp_path: Path) -> None:
    run, text = tmp_path / "run", "a lazy dog and a quick fox\n" * 12
    path = write_text(tmp_path / "text.txt", text)
    finished(run, base=char_text(path))
    known = data_identity.known_meaning(run)
    for changed_text, outcome in {text.replace("z", "\x01"): "'\\x01'", text.replace("z", "y"): ""}.items():
        other = write_text(tmp_path / "other.txt", changed_text)
        config = checked(base=char_text(other, f"+data.eval.path={other}"))
        if outcome:
            with pytest.raises(DataError) as refused:
                build_evaluation(config, alone(), {}, known)
            assert outcome in refused.value.happened
        else:  # fewer characters have the numbers that they have in the run
            (loader,) = build_evaluation(config, alone(), {"model.vocab_size": len(known["vocabulary"])}, known).eval_loaders.values()
            assert loader.source is not None and loader.source.meaning == known
    assert load(run).data.meaning == known
    path.write_text(text.replace("z", "\x01"))
    with pytest.raises(DataError, match="x01"):
        _ = load(run).data
    with pytest.raises(UserError) as changed:
        resumed(run, base=char_text(path))
    assert "vocabulary: without 'z', and with '\\x01' now" in changed.value.happened
    path.write_text(text)
    evaluated_on_other = write_text(tmp_path / "val.txt", text.replace("z", "\x01"))
    with pytest.raises(DataError, match="x01"):  # also in training: the evaluation split may be another file
        components(base=char_text(path, f"+data.eval.path={evaluated_on_other}"))


class Named:
    """A data source of a user's: without a fingerprint, with classes by name."""

    def __init__(self, classes: list[str], length: int = 12, scale: float = 1.0) -> None:
        self.classes, self._length, self._scale = classes, length, scale

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"num_classes": len(self.classes), "image_shape": (1, 4, 4)}

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(indices), 1, 4, 4), torch.from_numpy(indices % len(self.classes))


def named(*classes: str, length: int = 12) -> list[str]:
    own = ["data=custom", f"data._target_={__name__}.Named", f"+data.classes=[{','.join(classes)}]", f"+data.length={length}"]
    return [*own, "+data.eval={}", "model=mlp", "model.width=4", "trainer.global_batch_size=4", *FEW[2:]]


def test_classes_of_a_users_data_are_those_that_the_model_knows(tmp_path: Path) -> None:
    finished(tmp_path, base=named("cat", "dog"))
    known = data_identity.known_meaning(tmp_path / "checkpoints/last")
    assert known == {"classes": ["cat", "dog"]}
    for other in (named("dog", "cat"), named("cat", "wolf")):
        with pytest.raises(UserError, match="classes") as refused:
            build_evaluation(checked(base=other), alone(), {}, known)
        build_evaluation(checked(f"accept_changed_data={code_of(refused.value)}", base=other), alone(), {}, known)
        with pytest.raises(UserError, match="classes"):
            resumed(tmp_path, base=other)
        own = build(checked(base=other), alone()).data_identity["meaning"]
        with pytest.raises(UserError, match=r"init_from: .*do not mean what"):
            data_identity.require_same_meaning(own, known, key="init_from", accepted=None)
    with pytest.raises(UserError, match=r"data\.samples: 12 -> 8"):
        resumed(tmp_path, base=named("cat", "dog", length=8))


def test_tensors_are_known_by_their_first_and_last_row() -> None:
    def found(tensor: torch.Tensor) -> Mapping[str, Any]:
        return as_source(TensorDataset(tensor)).fingerprint

    rows = torch.arange(12.0).view(4, 3).to(torch.bfloat16)
    assert found(rows) == found(rows.clone()) != found(rows.flip(0))


def test_ranks_with_other_data_are_named() -> None:
    class Two:
        is_main, size = True, 2

        def gather_to_main(self, value: dict[str, str]) -> list[dict[str, str]]:
            return [value, {**value, "data.bytes": "0"}]

        def from_main(self, make: Callable[[], Any]) -> Any:
            return make()

    world: Any = Two()
    with pytest.raises(UserError, match=r"other data than rank 0: rank 1 data\.bytes"):
        data_identity.require_alike({"data": {"data.bytes": 7, "data.samples": 3}}, world)
    data_identity.require_alike({"data": {"data.bytes": 7}}, alone())


def test_the_identity_is_part_of_every_checkpoint(tmp_path: Path) -> None:
    parts = components(*IMAGES)
    saver = Saver(folder=tmp_path, world=alone(), config_hash="abc")
    saver.save(checkpoint_content(parts, TrainState(step=4, position=128), WindowSums(), alone()))
    assert saver.finish() is None
    assert data_identity.saved_identity(tmp_path / "step_00000004") == parts.data_identity
    assert auto.yaml_value(parts.data_identity) == parts.data_identity
