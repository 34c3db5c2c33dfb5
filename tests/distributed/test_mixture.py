"""A mixture with blended samples and several evaluation sets: the same on one rank and on three, and over a resume."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]

_IMAGES = "_target_: ddp_train.data.synthetic_images.SyntheticImages, image_size: 8"
WORDS = [
    *["data=mixture", "model=mlp", "model.width=16", "cluster=cpu", "loader.micro_batch_size=8", "trainer.global_batch_size=24"],
    f"+data.sources.clean={{weight: 3, data: {{{_IMAGES}, num_samples: 300}}}}",
    f"+data.sources.noisy={{weight: 1, data: {{{_IMAGES}, num_samples: 20, noise: 2.0, seed: 1}}}}",
    "data.eval={sources: {noisy: null, clean: {data: {split: eval, num_samples: 50}}}}",
    f"+evaluation.sets.few={{{_IMAGES}, split: eval, num_samples: 2}}",
    *["loader.mixup_alpha=0.4", "loader.cutmix_alpha=1.0", "debug.max_steps=12", "evaluation.every_steps=6", "trainer.log_every_steps=1"],
    *["evaluation.save_predictions=true", "checkpoint.metric=eval/few/loss", "~metrics.tensorboard"],
]


def ran(project: Project, name: str, *words: str, stops_after: int | None = None) -> list[dict[str, Any]]:
    stop = [] if stops_after is None else [f"debug.faults=[{{kind: sigterm, step: {stops_after - 1}}}]"]
    done = project.run(*WORDS, *words, *stop, f"hydra.run.dir=outputs/{name}")
    if stop:
        assert done.returncode == 75, done.output
        done = project.run("resume", f"outputs/{name}", "debug.faults=[]")
    assert done.returncode == 0, done.output
    assert len(list((project.folder / "outputs" / name / "predictions").glob("**/step_*/loss.npy"))) == 4
    names = ("step", "samples", "samples/clean", "samples/noisy", "loss", "grad_norm", "accuracy", "few/loss", "few/accuracy")
    return [{key: record[key] for key in names if key in record} for record in metrics(project.folder / "outputs" / name)]


def test_ranks_and_a_resume_change_nothing(project: Project) -> None:
    whole = ran(project, "whole", "cluster.processes_per_node=3")
    assert ran(project, "halves", "cluster.processes_per_node=3", stops_after=6) == whole
    for mine, theirs in zip(ran(project, "one", "cluster.processes_per_node=1"), whole, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert whole[-1].keys() >= {"loss", "few/loss"} and whole[0]["samples/clean"] + whole[0]["samples/noisy"] == 24
