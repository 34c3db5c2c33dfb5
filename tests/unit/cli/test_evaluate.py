"""`ddp-train evaluate` and `predict`: from what is typed to a job of its own, and what that job does, in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.cli.evaluate import evaluate, predict
from ddp_train.cli.resume import resume_typed
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, ConfigErrors, EnvironmentRefuses, UserError
from ddp_train.launch.job import Evaluation, Job
from ddp_train.rank.evaluate_job import evaluate_job
from ddp_train.run_folder.claim import give_up_claims
from ddp_train.run_folder.result import Result, Status
from ddp_train.training.loop import evaluation
from ddp_train.training.parts.components import Components
from ddp_train.training.train_state import TrainState
from tests.conftest import metrics
from tests.fake_runner import FakeRunner
from tests.unit.parts import rank_run, saved
from tests.unit.training.finished import finished


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    give_up_claims()


def begun(command: Any, *words: str) -> Job:
    """Type a command, and return the job that would be started."""
    jobs: list[Job] = []
    runner = FakeRunner(lambda job: jobs.append(Job.from_json(job.to_json())) or 0)
    assert command([*words], runner) == 0
    return jobs[0]


def work_of(job: Job) -> Evaluation:
    assert isinstance(job.work, Evaluation)
    return job.work


def run(job: Job) -> Status:
    return evaluate_job(rank_run(job, TrainState()), work_of(job))


def done(command: Any, *words: str) -> Job:
    job = begun(command, *words)
    assert run(job) is Status.COMPLETED
    return job


def measured(parts: Components) -> dict[str, float]:
    found = evaluation.evaluate(parts, alone())
    assert found is not None
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "evaluations" not in path.parts
    }


def test_a_checkpoint_is_scored_as_in_training_and_nothing_of_the_run_is_touched(tmp_path: Path) -> None:
    parts = finished(tmp_path)
    before = files(tmp_path)
    job = done(evaluate, str(tmp_path))
    assert job.run_folder.root.parent == tmp_path / "evaluations"
    result = job.run_folder.read_result()
    assert result is not None and (result.status, result.step) == (Status.COMPLETED, 7)
    assert result.last == {f"eval/{name}": value for name, value in measured(parts).items()}
    (record,) = metrics(job.run_folder.root)
    assert {name: record[name] for name in ("split", "step", "samples")} == {"split": "eval", "step": 7, "samples": 224}
    assert files(tmp_path) == before


def test_other_data_another_checkpoint_and_another_number_of_ranks_are_taken(tmp_path: Path) -> None:
    parts = finished(tmp_path)
    torch.nn.init.zeros_(next(parts.model.parameters()))
    saved(tmp_path / "checkpoints", 9, parts)
    words = ["data.eval.num_samples=33", "cluster.processes_per_node=3", "trainer.global_batch_size=2"]
    with pytest.raises(ConfigError, match=r"trainer\.global_batch_size: is a key of training"):
        begun(evaluate, str(tmp_path), *words)
    job = begun(evaluate, str(tmp_path / "checkpoints/step_00000007"), *words[:2])
    assert job.config.batch.world_size == 3 and work_of(job).checkpoint.endswith("step_00000007")
    job = done(evaluate, str(tmp_path / "checkpoints/step_00000007"), words[0], "evaluation.save_predictions=true")
    result = job.run_folder.read_result()
    assert result is not None and result.step == 7
    assert len(np.load(job.run_folder.predictions_of(7) / "prediction.npy")) == 33


def test_what_only_training_could_do_on_one_rank_is_no_matter(tmp_path: Path) -> None:
    finished(tmp_path, "trainer.optimizer_in_backward=true")
    job = begun(evaluate, str(tmp_path), "cluster.processes_per_node=2")
    assert job.config.batch.world_size == 2


SETS = ["+data.eval.noise=0.1", "+evaluation.sets.few={num_samples: 3}", "+evaluation.sets.noisy={split: eval, noise: 2.0}"]


def test_all_sets_of_the_run_are_scored_or_one(tmp_path: Path) -> None:
    parts = finished(tmp_path, *SETS)
    every = {f"eval/{name}": value for name, value in measured(parts).items()}
    assert {"eval/loss", "eval/few/loss", "eval/noisy/loss"} <= every.keys()
    job = done(evaluate, str(tmp_path))
    result = job.run_folder.read_result()
    assert result is not None and result.last == every
    assert json.loads(job.run_folder.batches.read_text())["done"] == sum(len(loader) for loader in parts.eval_loaders.values())  # type: ignore[arg-type, misc]
    result = done(evaluate, str(tmp_path), "--set=noisy").run_folder.read_result()
    assert result is not None and result.last["eval/loss"] == every["eval/noisy/loss"] and "eval/few/loss" not in result.last
    result = done(evaluate, str(tmp_path), "data.num_samples=9").run_folder.read_result()  # other data, alone
    assert result is not None and "eval/few/loss" not in result.last
    assert len(np.load(done(predict, str(tmp_path), "--set=few").run_folder.predictions_of(7) / "prediction.npy")) == 3
    with pytest.raises(ConfigError, match=r"--set: is fw, which the run does not have\s+expected: one of few, noisy"):
        begun(evaluate, str(tmp_path), "--set=fw")


def test_of_sets_that_all_have_names_one_is_predicted(tmp_path: Path) -> None:
    finished(tmp_path, *SETS[1:], "data.eval=null")
    result = done(evaluate, str(tmp_path)).run_folder.read_result()
    assert result is not None and {"eval/few/loss", "eval/noisy/loss"} <= result.last.keys() and "eval/loss" not in result.last
    with pytest.raises(ConfigError, match=r"without a name[\s\S]*--set=few"):
        begun(predict, str(tmp_path))


@pytest.mark.parametrize("debug", ["fast", "overfit"])
def test_of_a_run_that_was_cut_short_to_try_it_all_is_evaluated(tmp_path: Path, debug: str) -> None:
    finished(tmp_path, f"debug={debug}", "data.eval.num_samples=33", "evaluation.batch_size=4")
    job = done(evaluate, str(tmp_path), "evaluation.save_predictions=true")
    assert len(np.load(job.run_folder.predictions_of(7) / "prediction.npy")) == 33
    assert json.loads(job.run_folder.batches.read_text())["done"] == 9
    assert begun(evaluate, str(tmp_path), "evaluation.max_batches=2").config.evaluation.max_batches == 2


def test_a_group_is_chosen_as_for_a_run(tmp_path: Path) -> None:
    finished(tmp_path)
    config = begun(evaluate, str(tmp_path), "data=mnist", "data.root=there", "cluster=local", "cluster.device=cpu").config
    assert config.data["_target_"].endswith("MNIST") and config.data["eval"] == {}
    assert (config.data["root"], config.data["split"]) == ("there", "test")  # the data is that of its evaluation
    with pytest.raises(ConfigError, match=r"data: has no option 'mnits'[\s\S]*data=mnist"):
        begun(evaluate, str(tmp_path), "data=mnits")
    with pytest.raises(ConfigErrors, match=r"data\.num_sample"):
        begun(evaluate, str(tmp_path), "data.num_sample=3")


def test_a_group_of_the_users_own_is_found_where_the_project_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "run")
    (tmp_path / "conf/amp").mkdir(parents=True)
    (tmp_path / "conf/amp/mine.yaml").write_text("_target_: ddp_train.amp.Amp\ndtype: bfloat16\n")
    (tmp_path / "pyproject.toml").write_text('[tool.ddp_train]\nconf = "conf"\n')
    monkeypatch.chdir(tmp_path)
    assert begun(evaluate, "run", "amp=mine").config.amp["dtype"] == "bfloat16"


def test_a_class_of_ones_own_comes_with_its_arguments(tmp_path: Path) -> None:
    finished(tmp_path)
    own = "data._target_=ddp_train.data.synthetic_images.SyntheticImages"
    job = begun(evaluate, str(tmp_path), "data=custom", own, "+data.num_samples=3", "+data.split=eval")
    assert {"num_samples": 3, "split": "eval"}.items() <= job.config.data.items()
    with pytest.raises(ConfigErrors, match=r"data\._target_: has no value yet") as raised:
        begun(evaluate, str(tmp_path), "data=custom")
    assert str(raised.value).count("data._target_:") == 1


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    finished(tmp_path)
    with pytest.raises(ConfigErrors, match=r"data\.noise: '\[0\.1' cannot be read[\s\S]*matching brackets"):
        begun(evaluate, str(tmp_path), "data.noise=[0.1")


def test_a_secret_and_an_object_of_a_chosen_group_stay_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "run")
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/mine.yaml").write_text(
        "_target_: builtins.dict\nsplit: train\ntoken: ${oc.env:MY_TOKEN}\ndtype: ${object:torch.float32}\neval:\n  split: eval\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.ddp_train]\nconf = "conf"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "hidden-value")
    data = begun(evaluate, "run", "data=mine").config.data
    assert (data["token"], data["dtype"], data["split"]) == ("${oc.env:MY_TOKEN}", "${object:torch.float32}", "eval")


def test_data_of_another_kind_is_refused(tmp_path: Path) -> None:
    finished(tmp_path)
    with pytest.raises(ConfigError, match=r"it has num_classes 5, and the model was made for 10 \(model\.num_classes\)"):
        done(evaluate, str(tmp_path), "data.num_classes=5")


def test_predictions_need_no_targets(tmp_path: Path) -> None:
    parts = finished(tmp_path)
    job = done(predict, str(tmp_path))
    folder = job.run_folder.predictions_of(7)
    assert parts.eval_loader is not None
    batches = [each.batch for each in parts.eval_loader]
    with torch.no_grad():
        expected = torch.cat([parts.model.eval()(images) for images, _ in batches]).argmax(dim=1)
    assert np.array_equal(np.load(folder / "prediction.npy"), expected)
    assert {path.name for path in folder.iterdir()} == {"prediction.npy", "probability.npy"}
    assert not job.run_folder.metrics.exists()


def test_every_checkpoint_is_scored_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = finished(tmp_path)
    job = begun(evaluate, str(tmp_path), "--watch")

    def train_on(seconds: float) -> None:
        """Save again while the watch waits, and end."""
        if not (tmp_path / "checkpoints/step_00000009").exists():
            saved(tmp_path / "checkpoints", 9, parts)
        else:
            Result(status=Status.COMPLETED, step=9).write(tmp_path / "result.json")

    monkeypatch.setattr("ddp_train.rank.evaluate_job.time", SimpleNamespace(sleep=train_on, time=time.time, monotonic=time.monotonic))
    assert run(job) is Status.COMPLETED
    assert [record["step"] for record in metrics(job.run_folder.root)] == [7, 9]
    assert json.loads((job.run_folder.root / "result.json").read_text())["step"] == 9
    assert run(job) is Status.COMPLETED  # started again: nothing is scored twice
    assert [record["step"] for record in metrics(job.run_folder.root)] == [7, 9]


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    for words, said in (([], "no run folder was given"), (["--wach"], "is not an option"), ([str(tmp_path)], "neither a run folder")):
        with pytest.raises(ConfigError, match=said):
            begun(evaluate, *words)
    finished(tmp_path)
    job = begun(evaluate, str(tmp_path))
    with pytest.raises(ConfigError, match="is an evaluation itself"):
        begun(evaluate, str(job.run_folder.root))
    with pytest.raises(ConfigError, match="is one checkpoint"):
        begun(evaluate, str(tmp_path / "checkpoints/last"), "--watch")
    (tmp_path / "checkpoints/step_00000007/rank_00000.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="all checkpoints are damaged"):
        run(job)


def test_a_watch_of_a_run_that_will_save_nothing_ends(tmp_path: Path) -> None:
    finished(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        begun(evaluate, str(tmp_path))
    Result(status=Status.INTERRUPTED).write(tmp_path / "result.json")
    with pytest.raises(EnvironmentRefuses, match="has saved no checkpoint"):
        begun(evaluate, str(tmp_path), "--watch")


def test_an_evaluation_is_taken_up_again_as_one(tmp_path: Path) -> None:
    finished(tmp_path)
    job = begun(evaluate, str(tmp_path))
    give_up_claims()
    again = begun(resume_typed, str(job.run_folder.root))
    assert again.work == work_of(job)
    assert run(again) is Status.COMPLETED
    give_up_claims()
    with pytest.raises(ConfigError, match=r"is an evaluation, and it is done[\s\S]*ddp-train evaluate"):
        begun(resume_typed, str(job.run_folder.root))
