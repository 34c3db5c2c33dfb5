"""A run that is done is scored on another number of ranks, and started again as an evaluation by torchrun."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from ddp_train.distributed.world import alone
from ddp_train.run_folder.result import Result, Status
from ddp_train.training.loop.evaluation import evaluate
from tests.conftest import TINY, Project, finish, metrics, wait_for
from tests.unit.parts import saved
from tests.unit.training.finished import finished

pytestmark = pytest.mark.distributed


def evaluated(run: Path) -> list[Path]:
    return sorted((run / "evaluations").iterdir())


def test_a_run_is_scored_on_three_ranks_as_on_one(project: Project) -> None:
    run = project.folder / "outputs/run"
    run.parent.mkdir()
    parts = finished(run, "+evaluation.sets.few={num_samples: 2}", "+evaluation.sets.noisy={split: eval, noise: 2.0}")
    done = project.run("evaluate", "outputs/run", "cluster.processes_per_node=3")
    assert done.returncode == 0, done.output
    (folder,) = evaluated(run)
    (record,) = metrics(folder)
    expected = evaluate(parts, alone())
    assert expected is not None
    for part in ("", "few/", "noisy/"):  # also one with fewer samples than ranks
        assert record[f"{part}accuracy"] == expected[f"{part}accuracy"]
        assert record[f"{part}loss"] == pytest.approx(expected[f"{part}loss"], rel=1e-12)


def test_a_model_that_is_cut_is_scored_without_being_whole_on_any_rank(project: Project) -> None:
    """With averaged weights, tied ones, and a number of ranks that was not trained on: of 7 windows rank 0 has one more than the others."""
    text = project.write("text.txt", "whether tis nobler in the mind to suffer the slings and arrows " * 20)
    model = ["model=gpt", "model.num_layers=2", "model.num_heads=2", "model.width=16", "objective=language_modeling"]
    data = ["data=char_text", f"data.path={text}", "data.context_length=16", "data.stride=16", "evaluation.batch_size=2"]
    short = ["trainer.max_steps=4", "trainer.global_batch_size=6", "optimizer=adamw", "cluster=cpu", "cluster.processes_per_node=2"]
    done = project.run(*model, *data, *short, "strategy=fsdp", "callbacks=[ema]", "hydra.run.dir=outputs/run")
    assert done.returncode == 0, done.output
    run = project.folder / "outputs/run"
    trained = metrics(run, "eval")[-1]
    for ranks, more in ((3, []), (2, ["strategy=ddp"]), (1, [])):
        done = project.run("evaluate", "outputs/run", f"cluster.processes_per_node={ranks}", *more)
        assert done.returncode == 0, done.output
        folder = evaluated(run)[-1]
        (found,) = metrics(folder)
        assert found["loss"] == pytest.approx(trained["loss"], rel=1e-6)
        logs = "".join(path.read_text() for path in sorted((folder / "logs").glob("rank_*.log")))
        assert ("fsdp: 2 blocks of {'Block': 2}" in logs) == (ranks == 3)
    rows = []
    for ranks in (3, 1):
        done = project.run("predict", "outputs/run", f"cluster.processes_per_node={ranks}")
        assert done.returncode == 0, done.output
        ((path,),) = [[*folder.glob("*.npy")] for folder in (evaluated(run)[-1] / "predictions").rglob("") if [*folder.glob("*.npy")]]
        rows.append(np.load(path))
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_torchrun_evaluates_and_trains_nothing(project: Project) -> None:
    run = project.folder / "outputs/run"
    run.parent.mkdir()
    finished(run)
    done = project.run("evaluate", "outputs/run", torchrun=["--nproc-per-node=2"])
    assert done.returncode == 0, done.output
    (folder,) = evaluated(run)
    assert len(metrics(folder)) == 1
    assert not (folder / "checkpoints").exists()


@pytest.mark.long
def test_a_watch_goes_on_beside_the_training_and_ends_with_it(project: Project) -> None:
    words = [
        *TINY,
        "cluster=cpu",
        "cluster.processes_per_node=1",
        "trainer.max_steps=40",
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=20",
    ]
    training = project.start(*words, "evaluation.every_steps=10", "hydra.run.dir=outputs/run")
    wait_for(lambda: (project.folder / "outputs/run/config.yaml").exists())
    watch = project.run("evaluate", "outputs/run", "--watch", "cluster.processes_per_node=2", timeout=300)
    assert finish(training, timeout=300).returncode == 0
    assert watch.returncode == 0, watch.output
    run = project.folder / "outputs/run"
    (folder,) = evaluated(run)
    assert [record["step"] for record in metrics(folder)] == [5, 10, 15, 20, 25, 30, 35, 40]
    scored = {record["step"]: record["accuracy"] for record in metrics(folder)}
    assert all(scored[record["step"]] == record["accuracy"] for record in metrics(run, "eval"))


@pytest.mark.long
def test_a_stop_ends_a_watch_and_resume_goes_on_with_it(project: Project) -> None:
    run = project.folder / "outputs/run"
    run.parent.mkdir()
    parts = finished(run)
    watch = project.start("evaluate", "outputs/run", "--watch", "cluster.processes_per_node=2")
    wait_for(lambda: any(run.glob("evaluations/*/metrics.jsonl")) and metrics(evaluated(run)[0]) != [])
    watch.send_signal(signal.SIGINT)
    stopped = finish(watch)
    assert stopped.returncode == 130, stopped.output
    (folder,) = evaluated(run)
    assert f"resume {folder.relative_to(project.folder)}` does it again" in stopped.output
    saved(run / "checkpoints", 9, parts)
    Result(status=Status.COMPLETED, step=9).write(run / "result.json")
    done = project.run("resume", str(folder))
    assert done.returncode == 0, done.output
    assert [record["step"] for record in metrics(folder)] == [7, 9]
