"""A run that is continued: what is asked of one that is done is done, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.cli.saved_run import frozen_job, refuse_without_effect
from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.launch.job import Job
from ddp_train.system.files import write_json
from tests.unit.parts import checked, components, saved


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Give the folder of a run of ten steps that is done, with checkpoints of steps 5 and 10."""
    (tmp_path / "config.yaml").write_text(checked("trainer.max_steps=10").yaml({"model.num_classes": 10}))
    write_json(tmp_path / "result.json", {"status": "completed", "step": 10, "epoch": 0.5, "samples": 320})
    for step in (5, 10):
        saved(tmp_path / "checkpoints", step, components())
    return tmp_path


def resume(run: Path, *overrides: str, checkpoint: str | None = None) -> Job:
    job = frozen_job(run, list(overrides), checkpoint=checkpoint)
    refuse_without_effect(job, list(overrides))
    return job


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cluster.walltime=60",),  # a script that starts it again until it is done
        ("optimizer.lr=0.1", "trainer.max_steps=20"),
        ("trainer.max_steps=10", "model.num_classes=auto"),  # which it has by now
        ("model.num_classes=10",),
    ],
)
def test_what_has_an_effect_on_a_run_that_is_done_is_accepted(run: Path, overrides: tuple[str, ...]) -> None:
    resume(run, *overrides)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("optimizer.lr=0.1",), "optimizer.lr=0.1 would change nothing"),
        (("trainer.max_steps=9",), "trainer.max_steps=9 would change nothing"),
        (("cluster.walltime=60", "seed=2"), "done: seed=2 would"),
        (("evaluation.save_predictions=true",), r"`ddp-train evaluate RUN evaluation.save_predictions=true` saves predictions"),
    ],
)
def test_what_would_have_none_is_refused_with_what_to_type(run: Path, overrides: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        resume(run, *overrides)
    assert f"all 10 steps of {run} are done" in str(caught.value)
    assert "trainer.max_steps=20" in str(caught.value)


def test_callbacks_and_writers_can_go_and_nothing_else(run: Path) -> None:
    (run / "config.yaml").write_text(checked("trainer.max_steps=10", "callbacks=[early_stopping,ema]", base=[]).yaml())
    config = resume(run, "~callbacks.early_stopping", "~metrics.tensorboard", "trainer.max_steps=20").config
    assert list(config.callbacks) == ["ema"] and list(config.metrics) == ["console", "jsonl"]
    with pytest.raises(ConfigError, match=r"callbacks.ema: all 10 steps .*: ~callbacks.ema would change nothing"):
        resume(run, "~callbacks.ema")
    (run / "config.yaml").rename(run / "config.1.yaml")  # as an attempt without it leaves them
    (run / "config.yaml").write_text(config.yaml())
    again = resume(run, "~callbacks.early_stopping", "~metrics.tensorboard", "trainer.max_steps=20").config
    assert again.yaml() == config.yaml()
    (run / "config.1.yaml").rename(run / "config.yaml")
    for text in ("~callbacks.emma", "~callbacks", "~optimizer.lr"):
        with pytest.raises(ConfigErrors, match=f"{text[1:]}: would be removed\\n  expected: .*, ~callbacks.early_stopping, ~callbacks.ema"):
            resume(run, text)


def test_another_strategy_goes_on_with_a_run(run: Path) -> None:
    job = resume(run, "strategy=fsdp", "strategy.reshard_after_forward=false", "trainer.max_steps=20")
    assert job.config.strategy["_target_"] == "ddp_train.strategy.fsdp.FSDP"
    assert job.config.strategy["reshard_after_forward"] is False and "bucket_cap_mb" not in job.config.strategy
    with pytest.raises(ConfigErrors, match="strategy: is a group"):
        resume(run, "strategy=other")
    with pytest.raises(ConfigError, match="strategy=zero1 would change nothing"):
        resume(run, "strategy=zero1")


def test_what_cannot_be_read_is_named(run: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"data\.noise: '\[0\.1' cannot be read[\s\S]*matching brackets"):
        resume(run, "data.noise=[0.1")


def test_from_an_earlier_checkpoint_a_run_that_is_done_goes_on_with_anything(run: Path) -> None:
    resume(run, "optimizer.lr=0.1", checkpoint=str(run / "checkpoints/step_00000005"))
    for last in ("step_00000010", "last"):
        with pytest.raises(ConfigError):
            resume(run, "optimizer.lr=0.1", checkpoint=str(run / "checkpoints" / last))


@pytest.mark.parametrize("text", ["", "hydra:\n  runtime: {", "hydra: {}"])
def test_a_run_goes_on_without_a_whole_hydra_yaml(run: Path, text: str) -> None:
    (run / ".hydra").mkdir()
    (run / ".hydra/overrides.yaml").write_text("- seed=2\n")
    (run / ".hydra/hydra.yaml").write_text(text)
    assert frozen_job(run, ["seed=3"]).overrides == ["seed=3"]
    (run / ".hydra/overrides.yaml").write_text("- seed=2\n- [")
    assert frozen_job(run, ["seed=3"]).options == []
