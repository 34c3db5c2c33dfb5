"""A sample that cannot be read: named, or another one in its place."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, ConfigErrors, DataError
from ddp_train.loader.reader import LengthPlan, MicroBatch
from ddp_train.training.parts.components import Components
from ddp_train.training.record.logged import Reduction
from ddp_train.training.record.records import Record
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState
from tests.unit.loader.numbers import Damaged, read
from tests.unit.parts import ChosenStop, checked, components, saved, trainer


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_one_sample_names_it_and_its_file(workers: int) -> None:
    with pytest.raises(ValueError, match="this is no number") as caught:
        read(Damaged(32, bad=[7]), workers=workers)
    assert caught.value.__notes__[0].startswith("sample 7 (file_7.txt); loader.on_bad_sample=skip ")
    assert workers == 0 or "in batch" in caught.value.__notes__[1]  # the traceback there


def test_bad_samples_are_replaced_alike_whatever_the_split() -> None:
    source = Damaged(40, bad=[3, 11, 12])

    def ids(**how: int) -> list[int]:
        found = read(source, skips_bad_samples=True, epochs=2, **how)
        assert sum(len(micro_batch.bad_samples) for micro_batch in found) == 2 * 3
        return sorted(chain.from_iterable(micro_batch.batch.tolist() for micro_batch in found if not micro_batch.is_stand_in))

    alone = ids(workers=0)
    assert ids(workers=2) == ids(workers=0, world_size=3) == ids(workers=0, world_size=2, parts=3) == alone
    assert len(alone) == 80
    assert not {3, 11, 12} & set(alone)


def test_nothing_is_skipped_for_ever() -> None:
    with pytest.raises(DataError, match="nor can the 100 that were tried in its place"):
        read(Damaged(200, bad=range(200)), workers=0, skips_bad_samples=True)


SCHEDULE = "trainer.length_schedule={0: 4, 2: 8}"  # of 16, from the fourth step on
GROWING = "trainer.length_schedule={0: 4, 2: 8, 4: 16}"


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("whether tis nobler in the mind to suffer the slings and arrows " * 30)
    made = ["data=char_text", f"data.path={tmp_path}/text.txt", "data.context_length=16", "data.stride=16", "~metrics.tensorboard"]
    made += ["model=gpt", "model.num_layers=1", "model.num_heads=2", "model.width=16", "objective=language_modeling"]
    return [*made, "loader.micro_batch_size=5", "trainer.global_batch_size=10", "trainer.max_steps=7", "trainer.max_epochs=null"]


def test_a_step_has_the_length_of_its_number() -> None:
    plan = LengthPlan(16, [(2, 4), (5, 8)])
    assert [plan.at(step) for step in range(8)] == [16, 16, 4, 4, 4, 8, 8, 8]


def test_pieces_follow_each_other_and_nothing_is_lost() -> None:
    tokens = torch.arange(48).view(3, 16)
    whole = MicroBatch({"tokens": tokens, "targets": tokens + 1}, on_device=(tokens,))
    found = LengthPlan(16, [(0, 4)]).cut(whole, 0)
    assert found.batch["tokens"].tolist() == torch.arange(48).view(12, 4).tolist()
    assert found.on_device[0].tolist() == found.batch["tokens"].tolist()  # type: ignore[index]
    assert found.batch["tokens"].data_ptr() == tokens.data_ptr()
    assert found.pieces == 4
    for other in ((tokens, torch.zeros(3)), (torch.zeros(3, 15),)):
        with pytest.raises(DataError, match="whole windows of 16 tokens"):
            LengthPlan(16, [(4, 4)]).cut(MicroBatch(other), 0)


def gradient(parts: Components) -> Tensor:
    """Take the first step, and return its gradient."""
    noted: list[Tensor] = []
    parts.optimizer.step = lambda: noted.extend(  # type: ignore[method-assign]
        parameter.grad.flatten().clone() for parameter in parts.model.parameters() if parameter.grad is not None
    )
    steps = trainer(parts)
    steps.train_step(steps._of_next_step(steps._open_micro_batches()), global_batch_size=10)
    assert steps.window.read(Reduction(alone())).num_units == [160.0]  # every token of the windows
    return torch.cat(noted)


@pytest.mark.parametrize("split", [[], ["loader.micro_batch_size=10"], ["loader.micro_batch_size=3"]])
def test_the_gradient_is_the_mean_over_all_tokens_of_the_same_windows(text: list[str], split: list[str]) -> None:
    parts = components("trainer.length_schedule={0: 4}", *split, base=text)
    source: Any = parts.train_loader.source  # type: ignore[attr-defined]
    tokens, targets = (each.reshape(-1, 4) for each in source.batch(parts.train_loader.order.indices(0, 0, 10)))  # type: ignore[attr-defined]
    loss = nn.functional.cross_entropy(parts.model(tokens).flatten(0, 1), targets.flatten())
    expected = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(parts.model.parameters()))])
    assert torch.allclose(gradient(parts), expected, rtol=1e-5, atol=1e-7)


def curve(*overrides: str, base: list[str], state: TrainState | None = None, parts: Components | None = None) -> list[tuple[Any, ...]]:
    records: list[Record] = []
    steps = trainer(parts or components(*overrides, base=base), state, write=records.append)
    seen: list[int] = []
    steps.components.model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0].shape[1]) if model.training else None)
    steps.train()
    lengths = seen[::2]
    trained = [record for record in records if record["split"] == "train"]
    return [(record["step"], record["samples"], record["loss"], length) for record, length in zip(trained, lengths, strict=True)]


def test_lengths_follow_the_schedule_and_samples_do_not(text: list[str]) -> None:
    found, without = curve(GROWING, base=text), curve(base=text)
    assert [each[3] for each in found] == [4, 4, 8, 8, 16, 16, 16]
    assert [each[:2] for each in found] == [each[:2] for each in without]
    assert found[0][2] != without[0][2]


def test_a_run_that_goes_on_is_the_run_that_never_stopped(text: list[str], tmp_path: Path) -> None:
    whole = curve(GROWING, base=text)
    for stop in (1, 3, 4):
        parts = components(GROWING, base=text)
        trainer(parts, TrainState(), stop=ChosenStop(stop)).train()
        again, state = components(GROWING, base=text), TrainState()
        start_from(saved(tmp_path / str(stop), stop, parts), again, state, alone())
        state.position = stop * 10
        assert curve(base=text, state=state, parts=again) == whole[stop:]


def test_mfu_of_whole_windows_is_not_given_for_others(text: list[str]) -> None:
    parts, records = components(GROWING, base=text), list[Record]()
    parts.throughput.peak = parts.throughput._flops_per_unit = 1.0
    trainer(parts, write=records.append).train()
    assert [record["step"] for record in records if "mfu" in record] == [5, 6, 7]


def test_what_cannot_be_cut_is_refused(text: list[str]) -> None:
    for schedule in ("{-1: 4}", "4"):
        with pytest.raises(ConfigErrors, match="the first step"):
            checked(f"trainer.length_schedule={schedule}", base=text)
    with pytest.raises(ConfigError, match="has a length of 5"):
        components("trainer.length_schedule={0: 5}", base=text)
    with pytest.raises(ConfigError, match="not made of windows of one length"):
        components(SCHEDULE)
    parts = components(SCHEDULE, base=text)
    assert parts.length_plan is not None
    parts.length_plan.whole = 15
    with pytest.raises(DataError, match="whole windows of 15 tokens"):  # before the first step, whenever pieces begin
        trainer(parts)._open_micro_batches()
