"""The optimizer of a run from its config: groups by pattern, layer-wise rates, what is frozen; and that a resume does not mix them up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.config.check import ConfigErrors
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import Strategy
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.local_sgd import LocalSGD
from ddp_train.training.state import saved_state
from ddp_train.training.train_state import TrainState
from tests.unit.checkpoint.states import assert_same_state
from tests.unit.parts import checked, components, saved, trainer

DEEP = ["model.depth=3", "trainer.max_steps=3", "scheduler=warmup_linear"]


def first_layer() -> str:
    return next(name for name, _ in components(*DEEP).model.named_parameters()).rpartition(".")[0]


def test_groups_and_layers_train_with_their_own_rates_under_a_schedule() -> None:
    frozen = first_layer()
    groups = [
        f"+optimizer.groups.stem={{match: {frozen}, freeze: true}}",
        "+optimizer.groups.bias={match: '*.bias', lr: 0.5, betas: [0.5, 0.9]}",
    ]
    parts = components(*DEEP, *groups, "optimizer.layer_decay=0.5", "optimizer.lr=0.01")
    before = {name: parameter.clone() for name, parameter in parts.model.named_parameters()}
    rates = [(group["name"], group["initial_lr"], tuple(group["betas"])) for group in parts.optimizer.param_groups]
    assert rates[0] == ("rest", 0.01, (0.9, 0.95))
    assert rates[1] == ("rest", 0.005, (0.9, 0.95))
    assert rates[-1] == ("bias", 0.5, (0.5, 0.9))
    trainer(parts).train()
    changed = {name for name, parameter in parts.model.named_parameters() if not parameter.equal(before[name])}
    assert changed == {name for name in before if not name.startswith(frozen)}
    last = [group["lr"] / group["initial_lr"] for group in parts.optimizer.param_groups]
    assert last == pytest.approx([last[0]] * len(last))


def test_a_rate_of_the_class_s_own_is_scaled_too_and_one_that_is_missing_is_asked_for() -> None:
    bare = ["model.depth=3", "optimizer._target_=torch.optim.NAdam", *(f"~optimizer.{name}" for name in ("lr", "betas", "eps", "fused"))]
    parts = components(*bare, "optimizer.layer_decay=0.5")
    assert parts.optimizer.param_groups[0]["initial_lr"] == 0.002  # torch's default


def test_what_is_frozen_is_all_that_there_is() -> None:
    with pytest.raises(ConfigError, match="the model has no parameter to train"):
        components("+optimizer.groups.all={match: '*', freeze: true}")


def test_groups_come_back_from_a_checkpoint_and_are_not_mixed_up(tmp_path: Path) -> None:
    """Two layers alike in shape: the optimizer's state knows parameters by their places alone."""
    base = [*DEEP, "model.width=8"]
    layers = [name.rpartition(".")[0] for name, each in components(*base).model.named_parameters() if tuple(each.shape) == (8, 8)]
    assert len(layers) == 2
    one, other = (f"+optimizer.groups.slow={{match: {layer}, lr: 0.001}}" for layer in layers)
    parts = components(*base, one)
    trainer(parts).train()
    path = saved(tmp_path, 3, parts)
    again = components(*base, one)
    saved_state.start_from(path, again, TrainState(), alone())
    assert_same_state(again, parts)
    with pytest.raises(UserError, match=r"the optimizer had the parameters in another order: .* where .* is now"):
        saved_state.start_from(path, components(*base, other), TrainState(), alone())


def test_groups_change_nothing_where_they_say_the_same() -> None:
    plain, grouped = (components(*DEEP, *more) for more in ([], ["+optimizer.groups.bias={match: '*.bias', lr: ${optimizer.lr}}"]))
    for parts in (plain, grouped):
        trainer(parts).train()
    torch.testing.assert_close(list(grouped.model.parameters()), list(plain.model.parameters()), rtol=0, atol=0)


PLATEAU = ["scheduler=plateau", "evaluation.every_steps=1", "scheduler.patience=0", "scheduler.threshold=10.0", "trainer.max_steps=4"]
APART = ["strategy=local_sgd", "cluster.processes_per_node=2"]
OWN_FSDP, OWN_LOCAL = (f"strategy._target_={__name__}.{name}" for name in ("OwnFSDP", "OwnLocalSGD"))
PAIRS = [f"strategy._target_={__name__}.Pairs", "cluster.processes_per_node=2"]
THIN = ["strategy=power_sgd", "cluster.processes_per_node=2"]


def evaluated(*overrides: str) -> list[float]:
    """Return the rate after each of the run's steps."""
    parts = components(*PLATEAU, "optimizer.lr=0.01", *overrides)
    rates: list[float] = []
    trainer(parts, evaluate_every_steps=1, decide_save=lambda step: bool(rates.append(float(parts.scheduler.get_last_lr()[0])))).train()
    return rates


def test_plateau_follows_the_evaluation() -> None:
    """No value is ten times better, so that every evaluation but the first cuts the rate."""
    assert evaluated() == pytest.approx([1e-2, 1e-3, 1e-4, 1e-5])
    assert evaluated("scheduler.metric=loss", "scheduler.threshold=-1000.0") == [0.01] * 4


class OwnFSDP(FSDP):
    """Derived from ours: the same rules hold."""


class OwnLocalSGD(LocalSGD):
    """Likewise."""


class Meaning(Strategy):
    """Another's, whose arguments are called as those of ours, and mean something else."""

    def __init__(self, *, replicas: int, static_graph: bool, sync_batchnorm: bool, cpu_offload: bool, **others: object) -> None: ...


class Pairs(Strategy):
    """Another's, which says of its own arguments what it refuses."""

    divides_ranks, refuses_accumulation, needs_gpu = ("pairs",), ("captures",), {"packs": (True, "false", "and a CPU has no packets")}

    def __init__(self, *, pairs: int = 1, captures: bool = False, packs: bool = False) -> None: ...


class Slow(torch.optim.LBFGS):
    """Derived from one of torch's."""


class LAMB(torch.optim.AdamW):
    """Says that it steps each number by itself, whatever its name."""

    needs_whole_matrices = False


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["scheduler.metric=bleu"], r"scheduler\.metric: is 'bleu', which the objective does not measure(.|\n)*accuracy"),
        (["+scheduler.mode=min", "scheduler.metric=accuracy"], r"scheduler\.mode: is min, and a larger accuracy is better"),
    ],
)
def test_a_metric_that_cannot_be_followed_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        components(*PLATEAU, *overrides)


def test_a_scheduler_of_epochs_counts_them_and_auto_is_their_number() -> None:
    cosine = ["scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "+scheduler.T_max=auto"]
    cosine += ["~scheduler.step_size", "~scheduler.gamma", "scheduler.every=epoch"]
    parts = components(*cosine, "trainer.max_steps=null", "trainer.max_epochs=2", "optimizer.lr=1.0", "trainer.global_batch_size=160")
    assert parts.scheduler.scheduler.T_max == 2  # type: ignore[attr-defined]
    rates: list[float] = []
    trainer(parts, decide_save=lambda step: bool(rates.append(float(parts.scheduler.get_last_lr()[0])))).train()
    assert rates == pytest.approx([1.0] * 3 + [0.5] * 4 + [0.0])


def test_the_steps_of_the_run_and_of_an_epoch_answer_auto() -> None:
    cycle = ["scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.step_size", "~scheduler.gamma"]
    cycle += ["+scheduler.max_lr=0.1", "+scheduler.steps_per_epoch=auto", "+scheduler.epochs=2", "+scheduler.total_steps=null"]
    parts = components(*cycle, "trainer.max_steps=7", "trainer.global_batch_size=160")
    assert parts.scheduler.total_steps == 8  # type: ignore[attr-defined]
    assert parts.answers["scheduler.steps_per_epoch"] == 4


def test_batches_that_grow_train_as_their_samples_say() -> None:
    """Two epochs of 640 samples: 4 steps of 80, and then of 160, whatever fits on a rank at once."""
    runs = {}
    for micro in (16, 160):
        records: list[dict[str, Any]] = []
        parts = components(
            *("trainer.global_batch_size=80", "trainer.batch_size_schedule={4: 160}", f"loader.micro_batch_size={micro}"),
            *("trainer.max_steps=null", "trainer.max_epochs=2", "trainer.clip_grad_norm=1.0"),
        )
        assert (parts.total_steps, parts.train_loader.grad_accum_steps) == (10, {16: 10, 160: 1}[micro])
        trainer(parts, write=records.append).train()
        runs[micro] = [(record["step"], record["samples"], record["loss"]) for record in records]
    assert [samples for _, samples, _ in runs[16]] == [80, 160, 240, 320, 480, 640, 640, 800, 960, 1120, 1280, 1280]
    for mine, theirs in zip(runs[16], runs[160], strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2] == pytest.approx(theirs[2], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["trainer.batch_size_schedule={a: 3}"],
            r"trainer\.batch_size_schedule: is .*a.*3(.|\n)*the first step, counted from 0, and the size",
        ),
        (["trainer.batch_size_schedule={5: 0}"], "steps and sizes of at least 1"),
        (
            ["trainer.batch_size_schedule={5: 3}", "loader.drop_last=true"],
            r"loader\.drop_last: is True, and trainer\.batch_size_schedule is given",
        ),
        (
            ["trainer.batch_size_schedule={5: 3}", "trainer.grad_accum_steps=2"],
            r"trainer\.grad_accum_steps: is 2, and trainer\.batch_size_sched",
        ),
        (
            ["trainer.batch_size_schedule={5: 1}", "cluster.processes_per_node=2", "trainer.global_batch_size=2"],
            r"trainer\.batch_size_schedule: has a size of 1 for 2 ranks",
        ),
        (
            ["trainer.batch_size_schedule={5: 900}", "cluster.processes_per_node=2", "strategy.static_graph=true"],
            r"strategy\.static_graph: is true, with 15 micro-batches a step",
        ),
        (["strategy=fsdp", "optimizer=muon", "cluster.processes_per_node=2"], r"optimizer: is muon, which needs whole matrices"),
        (["strategy=zero1", "optimizer=muon", "cluster.processes_per_node=2"], r"optimizer: is muon, which needs whole matrices"),
        (["strategy=fsdp", OWN_FSDP, "optimizer=muon", "cluster.processes_per_node=2"], r"optimizer: is muon, which needs whole matrices"),
        (
            ["strategy=fsdp", OWN_FSDP, f"optimizer._target_={__name__}.Slow", "cluster.processes_per_node=2"],
            r"optimizer: is Slow, which needs whole matrices",
        ),
        (
            [
                "strategy=zero1",
                "optimizer=several",
                "optimizer.parts={net: {_target_: torch.optim.Muon, _partial_: true}}",
                "cluster.processes_per_node=2",
            ],
            r"optimizer\.parts\.net: is Muon, which",
        ),
        ([*PAIRS, "+strategy.pairs=3"], r"strategy\.pairs: is 3, on 2 ranks"),
        ([*PAIRS, "+strategy.captures=true", "trainer.grad_accum_steps=2"], r"strategy\.captures: is true, with 2 micro-batches a step"),
        ([*PAIRS, "+strategy.packs=true"], r"strategy\.packs: is true, and a CPU has no packets"),
        ([*APART, OWN_LOCAL, "strategy.every_steps=0"], r"strategy\.every_steps: is 0"),
        (["strategy=fsdp", "strategy.replicas=2", "cluster.processes_per_node=3"], r"strategy\.replicas: is 2, on 3 ranks"),
        (["strategy.sync_batchnorm=true", "cluster.processes_per_node=2"], r"strategy\.sync_batchnorm: is true, and torch's SyncBatchNorm"),
        (["strategy=zero1", "strategy.sync_batchnorm=true", "cluster.processes_per_node=2"], r"strategy\.sync_batchnorm: is true"),
        (["strategy.reduce_dtype=bfloat16", "cluster.processes_per_node=2"], r"strategy\.reduce_dtype: is bfloat16, in which torch's DDP"),
        (["strategy.reduce_dtype=float8", "cluster.processes_per_node=2"], r"strategy\.reduce_dtype"),
        ([*APART, "strategy.every_steps=0"], r"strategy\.every_steps: is 0"),
        ([*APART, "strategy.outer_lr=0.0"], r"strategy\.outer_lr: is 0\.0"),
        ([*APART, "strategy.outer_momentum=1.0"], r"strategy\.outer_momentum: is 1\.0"),
        ([*APART, "strategy.every_steps=1", "optimizer=adamw"], r"strategy\.every_steps: is 1, and the optimizer is AdamW"),
        ([*APART, "strategy.every_steps=1", "optimizer=sgd", "trainer.clip_grad_norm=1.0"], "and trainer.clip_grad_norm is given"),
        ([*APART, "amp=fp16"], r"amp\.dtype: is float16, and with strategy=local_sgd"),
        (["strategy=fsdp", "strategy.prefetch=0"], r"strategy\.prefetch: is 0"),
        ([*THIN, "strategy.rank=0"], r"strategy\.rank: is 0"),
        ([*THIN, "strategy.from_step=-1"], r"strategy\.from_step: is -1"),
        ([*THIN, "amp=fp16"], r"amp\.dtype: is float16, and with strategy=power_sgd"),
        ([*THIN, "trainer.optimizer_in_backward=true"], r"strategy: is PowerSGD, and trainer\.optimizer_in_backward is true"),
    ],
)
def test_sizes_and_strategies_that_cannot_be_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors, match=says):
        checked(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"optimizer._target_={__name__}.LAMB"],
        ["optimizer=adamw", "trainer.optimizer_in_backward=true"],  # gradients are whole within backward, as with FSDP itself
    ],
)
def test_what_is_derived_from_a_class_may_do_what_that_may(overrides: list[str]) -> None:
    assert checked("strategy=fsdp", OWN_FSDP, "cluster.processes_per_node=2", *overrides).batch.world_size == 2


def test_rules_of_our_strategies_leave_those_of_others_alone() -> None:
    given = ("+strategy.replicas=3", "strategy.static_graph=true", "strategy.sync_batchnorm=true", "+strategy.cpu_offload=true")
    own = ("cluster=cpu", "cluster.processes_per_node=4", "trainer.grad_accum_steps=2", f"strategy._target_={__name__}.Meaning")
    assert checked(*own, *given).strategy["replicas"] == 3


def test_a_checkpoint_before_the_first_evaluation_has_no_best_value_yet(tmp_path: Path) -> None:
    again = components(*PLATEAU)
    saved_state.start_from(saved(tmp_path, 1, components(*PLATEAU)), again, TrainState(), alone())
    assert again.scheduler.scheduler.best == -float("inf")  # type: ignore[attr-defined]
