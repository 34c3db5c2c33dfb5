"""A run from its config: batches that grow, and which sizes, optimizers and strategies do not go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_train.errors import ConfigErrors
from ddp_train.interfaces import Strategy
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.local_sgd import LocalSGD
from tests.unit.parts import checked, components, trainer

APART = ["strategy=local_sgd", "cluster.processes_per_node=2"]
OWN_FSDP, OWN_LOCAL = (f"strategy._target_={__name__}.{name}" for name in ("OwnFSDP", "OwnLocalSGD"))
PAIRS = [f"strategy._target_={__name__}.Pairs", "cluster.processes_per_node=2"]
THIN = ["strategy=power_sgd", "cluster.processes_per_node=2"]


class OwnFSDP(FSDP):
    """Derived from ours: the same rules hold."""


class OwnLocalSGD(LocalSGD):
    """Likewise."""


class Meaning(Strategy):
    """Another's, whose arguments are called as those of ours, and mean something else."""

    def __init__(self, *, replicas: int, static_graph: bool, sync_batchnorm: bool, cpu_offload: bool, **others: object) -> None: ...


class Pairs(Strategy):
    """Another's, which says of its own arguments what it refuses."""

    divides_ranks, refuses_accumulation = ("pairs",), ("captures",)

    def __init__(self, *, pairs: int = 1, captures: bool = False) -> None: ...


class Slow(torch.optim.LBFGS):
    """Derived from one of torch's."""


class LAMB(torch.optim.AdamW):
    """Says that it steps each number by itself, whatever its name."""

    needs_whole_matrices = False


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
        ([*APART, OWN_LOCAL, "strategy.every_steps=0"], r"strategy\.every_steps: is 0"),
        (["strategy=fsdp", "strategy.replicas=2", "cluster.processes_per_node=3"], r"strategy\.replicas: is 2, on 3 ranks"),
        (["strategy.reduce_dtype=float8", "cluster.processes_per_node=2"], r"strategy\.reduce_dtype"),
        ([*APART, "strategy.every_steps=0"], r"strategy\.every_steps: is 0"),
        ([*APART, "strategy.outer_lr=0.0"], r"strategy\.outer_lr: is 0\.0"),
        ([*APART, "strategy.outer_momentum=1.0"], r"strategy\.outer_momentum: is 1\.0"),
        ([*APART, "amp=fp16"], r"amp\.dtype: is float16, and with strategy=local_sgd"),
        (["strategy=fsdp", "strategy.prefetch=0"], r"strategy\.prefetch: is 0"),
        (["data.num_classes=0"], r"data\.num_classes: is 0"),
        (["+evaluation.sets.noisy.noise=-1.0"], r"evaluation\.sets\.noisy\.noise: is -1\.0"),
        (["+callbacks.slow={_target_: ddp_train.callbacks.early_stopping.EarlyStopping, patience: 0}"], r"callbacks\.slow\.patience: is 0"),
        (["objective=language_modeling", "objective.chunk_tokens=0"], r"objective\.chunk_tokens: is 0"),
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
