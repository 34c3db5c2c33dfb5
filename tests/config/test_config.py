"""The configuration: every file composes and fits its class; every mistake is found before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ddp_train import CONF
from ddp_train.cli import location
from ddp_train.cli import main as app
from ddp_train.config.check import check_config, check_frozen
from ddp_train.config.cluster import environment_of, rendezvous_of
from ddp_train.config.run_config import RunConfig
from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.launch.job import Job
from ddp_train.system import devices
from ddp_train.system.files import write_json
from tests.fake_runner import FakeRunner

OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("experiment", "cluster") and path.stem != "custom"
)
CLUSTERS = sorted(path.stem for path in CONF.glob("cluster/*.yaml"))
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))
FITTING = {  # what an option of one group needs of the others
    "data=char_text": ["model=gpt", "objective=language_modeling"],
    "data=packed_tokens": ["model=gpt", "objective=language_modeling"],
    "data=padded_tokens": ["model=gpt", "objective=language_modeling"],
    "model=gpt": ["data=char_text", "objective=language_modeling"],
    "objective=language_modeling": ["data=char_text", "model=gpt"],
    "amp=fp16": [  # two nodes: this machine's GPUs are not asked for
        *["cluster=machines", "cluster.device=cuda", "cluster.nodes=2", "cluster.rendezvous_endpoint=node0:29400"]
    ],
    "scheduler=warmup_stable_decay": ["trainer.max_steps=5000"],
    "objective=transformers": ["objective.unit=sample", "+loader.collate._target_=tests.config.test_config.composed"],
    "objective=distillation": ["objective.teacher={_target_: ddp_train.model.mlp.MLP, image_shape: auto, num_classes: auto}"],
    "callbacks=freeze": ["callbacks.freeze.patterns=[head]"],
    "callbacks=webhook": ["callbacks.webhook.url=http://localhost:1"],
    "optimizer=several": ["optimizer.parts={layers: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}}"],
}

NEEDS = {f"metrics={name}": name for name in ("wandb", "mlflow", "trackio")}
"""Options whose package may not be installed here."""


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def checked(*overrides: str) -> RunConfig:
    return check_config(composed(*overrides))


def problems(*overrides: str) -> list[ConfigError]:
    with pytest.raises(ConfigErrors) as raised:
        checked(*overrides)
    return raised.value.errors


def command_line(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, list[Job]]:
    """Run the command line in this process up to the point where a job would start; return the exit code and the jobs."""
    jobs: list[Job] = []

    def run_job(job: Job) -> int:
        jobs.append(job)
        return 0

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ddp-train", *arguments])
    return app.run(sys.argv[1:], FakeRunner(run_job)), jobs


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_fits_its_class(option: str) -> None:
    if option in NEEDS and find_spec(NEEDS[option]) is None:
        (problem,) = problems(option)
        assert f'pip install "ddp-train[{NEEDS[option]}]"' in str(problem)
        return
    assert checked(option, *FITTING.get(option, [])).tree["name"] == "default"


@pytest.mark.parametrize("preset", CLUSTERS)
def test_every_cluster_composes_and_passes_the_check(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    words = [f"cluster={preset}", "cluster.device=cpu", *(["cluster.hosts=[a,b:4]"] if preset == "ssh" else [])]
    if checked(*words).cluster.launcher != "local":  # there it would prove several copies
        for name, value in {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "node0:29400"}.items():
            monkeypatch.setenv(name, value)
    cluster = checked(*words).cluster
    found = rendezvous_of(cluster, os.environ)
    assert (cluster.launcher, found.max_nodes) in (("local", 1), ("machines", 2), ("slurm", 1), ("ssh", 2))
    assert all(isinstance(value, str) for value in environment_of(cluster.env).values())


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_names_itself(experiment: str) -> None:
    assert checked(f"experiment={experiment}").tree["name"] == experiment


def test_weights_that_a_run_began_with_may_be_gone_when_its_folder_is_typed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cluster=cpu", "hydra.run.dir=run", "init_from=gone.pt")
    assert command_line(monkeypatch, tmp_path, *words) == (2, [])
    assert "init_from: gone.pt: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "gone.pt").write_bytes(b"PK\x05\x06" + bytes(18))  # an archive without entries: the ranks look into it
    assert command_line(monkeypatch, tmp_path, *words)[0] == 0
    (tmp_path / "gone.pt").unlink()
    code, (job,) = command_line(monkeypatch, tmp_path, *words)
    assert code == 0 and job.config.init_from == "gone.pt"


class Nameless:
    """A model whose name does not tell what its loss is the mean over."""


class OfCausalLM(Nameless):
    """One whose name does."""


def unclear() -> object:
    """Give a model of a class that nobody knows before."""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Nameless", "objective.unit: is auto, and the name Nameless does not tell"),
        ("OfCausalLM", ""),
        ("unclear", ""),
    ],
)
def test_what_a_models_loss_is_the_mean_over_is_asked_before_the_start(model: str, said: str) -> None:
    words = ["objective=transformers", "model=custom", f"model._target_=tests.config.test_config.{model}"]
    words += ["data=custom", f"data._target_=tests.config.test_config.{model}"]
    if not said:
        assert checked(*words).tree["objective"]["unit"] == "auto"
        return
    (problem,) = problems(*words)
    assert said in str(problem) and problem.fix == "objective.unit=sample"
    assert checked(*words, problem.fix)


@pytest.mark.parametrize(
    ("word", "key"),
    [("data=synthetic_images", "data"), ("loader.fields=[image,label]", "loader.fields")],
)
def test_an_objective_that_needs_labels_in_a_dict_refuses_pairs_before_the_start(word: str, key: str) -> None:
    words = ["objective=transformers", "model=custom", "model._target_=tests.config.test_config.OfCausalLM"]
    words += ["data=custom", "data._target_=tests.config.test_config.Nameless", word]
    words = [each for each in words if not (key == "data" and each.startswith("data._target_"))]
    (problem,) = problems(*words)
    assert problem.key == key and "dict" in problem.expected
    assert checked(*words, "+loader.collate._target_=tests.config.test_config.unclear")


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_yaml_says_what_it_is_and_explains_every_value(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip() and line != "# @package _global_"]
    assert lines[0].startswith("# "), "the first line says what this is and when to use it"
    if path.parent.name in ("experiment", "conf"):
        return
    owned = "\n".join(lines).split("\ndefaults:")[0].splitlines()
    parts = ("data:", "loader:", "evaluation:", "objective:", f"{path.stem}:")  # the last: what the option itself is
    depth = 0
    for line in owned:
        if not line.startswith((" ", "#")):
            depth = 2 if line in parts else 0  # of the values that are explained
        indent = len(line) - len(line.lstrip())
        is_value = ":" in line and line not in parts and not line.lstrip().startswith(("#", "_target_", "eval:", "-"))
        is_told = path.parent.name == "metrics" and line.endswith(": auto")  # default.yaml's first lines say what those take
        if is_value and indent <= depth and not is_told:
            assert "#" in line, f"no comment: {line}"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_shows_its_command(experiment: str) -> None:
    assert f"ddp-train experiment={experiment}" in (CONF / "experiment" / f"{experiment}.yaml").read_text()


def test_the_batch_identity_is_derived_either_way() -> None:
    cpu = ["cluster=cpu", "cluster.processes_per_node=4", "loader.micro_batch_size=8"]
    assert str(checked(*cpu).batch) == "global batch 32 = micro-batch 8 x 4 ranks x accumulation 1"
    assert checked(*cpu, "trainer.grad_accum_steps=3").batch.global_batch_size == 96
    assert checked(*cpu, "trainer.global_batch_size=64").batch.grad_accum_steps == 2
    ragged = checked(*cpu, "trainer.global_batch_size=70").batch
    assert str(ragged) == "global batch 70 <= micro-batch 6 x 4 ranks x accumulation 3"
    assert checked(*cpu).trainer.global_batch_size == 32  # recorded, so that resuming on other ranks keeps it


def test_a_frozen_config_keeps_its_global_batch_on_another_number_of_ranks() -> None:
    frozen = checked("cluster=cpu", "trainer.grad_accum_steps=2").tree
    frozen["cluster"]["processes_per_node"] = 1
    assert str(check_frozen(frozen).batch) == "global batch 128 = micro-batch 32 x 1 rank x accumulation 4"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["loader.micro_batch_size=0"], "loader.micro_batch_size", "at least 1"),
        (["trainer.max_steps=abc"], "trainer.max_steps", "int or null"),
        (["trainer.clip_grad_norm=0"], "trainer.clip_grad_norm", "more than 0"),
        (["trainer.max_epochs=null"], "trainer.max_steps", "neither max_steps nor max_epochs"),
        (["optimizer.lr=fast"], "optimizer.lr", "a value of type float"),
        (["model._target_=torch.nn.Lineaar"], "model._target_", "did you mean torch.nn.Linear?"),
        (["model._target_=no_such_package.Model"], "model._target_", "no module 'no_such_package'"),
        (["+model.widht=3", "~model.width"], "model.widht", "did you mean +model.width=3?"),
        (["~model.num_classes"], "model.num_classes", "needs this argument"),
        (["+trainer.max_stepz=3"], "trainer.max_stepz", "did you mean trainer.max_steps=3?"),
        (
            ["trainer.global_batch_size=64", "trainer.grad_accum_steps=4", "cluster=cpu"],
            "trainer.global_batch_size",
            "the other is derived",
        ),
        (["trainer.global_batch_size=1", "cluster=cpu"], "trainer.global_batch_size", "smaller than the world size 2"),
        (["trainer.max_steps=10", "scheduler.warmup_steps=20"], "scheduler.warmup_steps", "more than the run's 10 steps"),
        (["amp=fp16", "cluster=cpu"], "amp", "amp=bf16"),
        (["strategy=fsdp", "strategy.cpu_offload=true", "cluster=cpu"], "strategy.cpu_offload", "strategy.cpu_offload=false"),
        (["activation_checkpointing.every=2"], "activation_checkpointing.every", "activation_checkpointing.blocks=auto"),
        (["activation_checkpointing.blocks=Block"], "activation_checkpointing.blocks", "[Block]"),
        (["compile=max_autotune", "compile.backend=eager"], "compile.mode", "compile=default"),
        (["compile=max_autotune", "strategy=fsdp", "cluster=cpu"], "compile.mode", "max-autotune-no-cudagraphs"),
        (
            ["compile=reduce_overhead", "trainer.grad_accum_steps=2", "cluster=cpu", "cluster.processes_per_node=1"],
            "compile.mode",
            "trainer.grad_accum_steps=1",
        ),
        (
            ["compile=reduce_overhead", "trainer.grad_accum_steps=2", "cluster=cpu", "strategy.find_unused_parameters=true"],
            "compile.mode",
            "compile=default",
        ),
        (["compile=default", "compile.regions=all"], "compile.regions", "auto, whole, or the classes"),
        (["deterministic=true", "precision.cudnn_benchmark=true"], "precision.cudnn_benchmark", "precision.cudnn_benchmark=false"),
        (["cluster.device=cuda", "cluster.processes_per_node=99"], "cluster", "need a GPU each"),
        (["cluster.device=gpu"], "cluster.device", "one of auto, cpu, cuda"),
        (["name=../escape"], "name", "letters, digits"),
        (["+traner.max_steps=3"], "traner", "did you mean trainer?"),
        (["data.root=${nowhere}", "data=mnist"], "data.root", "Interpolation key 'nowhere' not found"),
        (["seed=???"], "seed", "has no value yet"),
        (["optimizer.lr=[1,2]"], "optimizer.lr", "a value of type float"),
        (["optimizer.betas=0.9"], "optimizer.betas", "tuple"),
        (["data=mnist", "data.root=2024"], "data.root", 'data.root="2024"'),
        (["scheduler.warmup_steps=-5"], "scheduler.warmup_steps", "at least 0"),
        (["+metrics.mine.x=1"], "metrics.mine._target_", "the dotted path"),
        (["cluster.nodes=2"], "cluster.nodes", "cluster=machines"),
        (["cluster.nodes=2:1"], "cluster.nodes", "MIN:MAX"),
        (["cluster=machines", "cluster.nodes=2"], "cluster.rendezvous_endpoint", "node0:29400"),
        (["cluster=machines", "cluster.nodes=1:2", "cluster.rendezvous_endpoint=a:1"], "cluster.max_restarts", "would end the run"),
        (["checkpoint.every_minutes=0"], "checkpoint.every_minutes", "more than 0, or null"),
        (["checkpoint.keep_every_steps=6"], "checkpoint.keep_every_steps", "checkpoint.every_steps=6"),
        (["checkpoint.every_steps=4", "checkpoint.keep_every_steps=6"], "checkpoint.keep_every_steps", "checkpoint.keep_every_steps=8"),
        (["profile=trace", "profile.start_step=9", "trainer.max_steps=9"], "profile.start_step", "fewer than the run's steps"),
        (["profile.ranks=[0,2]", "cluster=cpu"], "profile.ranks", "ranks of this run, each once: 0 to 1"),
        (["profile.ranks=[0,0]", "cluster=cpu"], "profile.ranks", "each once"),
        (["profile.ranks=[]"], "profile.ranks", "each once"),
        (["profile.kind=time"], "profile.kind", "one of off, trace, memory"),
        (["profile.steps=0"], "profile.steps", "at least 1"),
        (["+init_from_keys.module=[1]"], "init_from_keys", "dict"),
        (["cluster.max_restarts=-1"], "cluster.max_restarts", "at least 0"),
        (["+cluster.env.WORLD_SIZE=3"], "cluster.env.WORLD_SIZE", "set by torchrun"),
        (["+cluster.env.NCCL_ALGO=[Ring,Tree]"], "cluster.env.NCCL_ALGO", "text, a number"),
        (["loader.on_device=true", "loader.num_workers=2"], "loader.num_workers", "leaves nothing to read"),
        (["strategy.static_graph=true", "trainer.grad_accum_steps=2", "cluster=cpu"], "strategy.static_graph", "2 micro-batches"),
        (["debug=faults", "debug.faults=[{knd:kill}]"], "debug.faults.0.knd", "did you mean debug.faults.0.kind=kill?"),
        (["debug=faults", "debug.faults=[{},{kind:kil}]"], "debug.faults.1.kind", "debug.faults.1.kind=kill"),
        (["debug=faults", "debug.faults=[{rank:2}]", "cluster=cpu"], "debug.faults.0.rank", "0 to 1"),
        (["debug=faults", "debug.faults=[{attempt:-1}]"], "debug.faults.0.attempt", "or every"),
        (["debug=faults", "debug.faults=[{kind:worker_kill}]"], "debug.faults.0.kind", "loader.num_workers=1"),
        (["debug=faults", "debug.faults=[{kind:slow}]"], "debug.faults.0.seconds", "is not given"),
        (["debug=faults", "debug.faults=[kill]"], "debug.faults.0", "a group of keys"),
        (["~strategy"], "strategy", "the section is missing"),
        (["health.on_nonfinite=ignore"], "health.on_nonfinite", "one of stop, skip, rewind"),
        (
            ["health.on_nonfinite=rewind", "checkpoint.every_minutes=null", "checkpoint.every_evaluation=false"],
            "health.on_nonfinite",
            "checkpoint.every_steps",
        ),
        (["health.on_spike=rewind", "checkpoint.every_steps=9"], "health.on_spike", "health.spike_zscore=8"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_its_fix(overrides: list[str], key: str, said: str) -> None:
    found = problems(*overrides)
    assert [error for error in found if error.key.startswith(key) and said in str(error)], "\n".join(map(str, found))


def test_all_mistakes_are_found_at_once() -> None:
    found = problems("loader.micro_batch_size=0", "optimizer.lr=fast", "amp=fp16", "cluster=cpu", "+checkpoint.evry_steps=1", "name=a/b")
    assert {"loader.micro_batch_size", "optimizer.lr", "checkpoint.evry_steps", "name"} <= {error.key for error in found}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.max_stepz=3"], "trainer.max_stepz: is not a key of this configuration\n  fix: did you mean trainer.max_steps=3?"),
        (["model=convet"], "model: has no option 'convet'"),
        (["hydra.ouput_subdir=x"], "did you mean hydra.output_subdir=x?"),
        (["optimizer.lr="], "optimizer.lr"),
        (["optimizer.betas=[0.9"], "matching brackets"),
        (["=3"], "problem"),
        (["resume=nowhere"], "resume: nowhere is neither a run folder nor a checkpoint"),
        (["--config-dir=nowhere"], "nowhere"),
        (["~model.nothing"], "model.nothing"),
        (["amp=off,bf16"], "amp"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, jobs = command_line(monkeypatch, tmp_path, *arguments)
    assert (code, jobs) == (2, [])
    shown = capsys.readouterr().err
    assert said in shown
    assert "nothing was started" in shown
    assert not list(tmp_path.iterdir())


def test_several_mistakes_of_one_command_line_are_shown_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["trainer.max_stepz=3", "model=convet", "optimizer.lr=abc", "hydra.ouput_subdir=x", "trainer.max_steps=abc"]
    assert command_line(monkeypatch, tmp_path, *arguments)[0] == 2
    assert "5 problems in the configuration" in capsys.readouterr().err
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=x", "seed=2", "trainer.max_stepz=3")[0] == 2
    assert "1 problem in the configuration" in capsys.readouterr().err


def test_a_job_carries_the_frozen_config_and_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, jobs = command_line(monkeypatch, tmp_path, "optimizer.lr=0.5", "hydra.run.dir=here", "cluster=cpu")
    assert code == 0
    (job,) = jobs
    assert job.run_folder.root == tmp_path / "here"
    assert Job.from_json(job.to_json()) == job
    assert job.run_folder.config.read_text() == job.config.yaml()
    assert "${" not in job.config.yaml()


def test_nothing_is_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=full")[0] == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=run", "seed=1")[0] == 0
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=run", "seed=2")[0] == 2
    assert "seed: 1 -> 2" in capsys.readouterr().err
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=run", "seed=1", "resume=never")[0] == 2
    assert command_line(monkeypatch, tmp_path, "hydra.run.dir=run", "seed=1")[0] == 0  # resume=auto


def test_hydra_names_that_nobody_reads_are_found_in_a_users_file_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {run: {dri: x}, ouput_subdir: y}\n")
    assert command_line(monkeypatch, tmp_path, f"--config-dir={tmp_path}", "--config-name=mine")[0] == 2
    shown = capsys.readouterr().err
    assert "did you mean hydra.run.dir?" in shown or "dri" in shown


class FakeSlot:
    """A slot whose jobs end as soon as they are asked, as `outcome` says of their seed: an exit code and a status."""

    def __init__(self, outcome: dict[int, tuple[int, str]], seen: list[str]) -> None:
        self.outcome, self.seen = outcome, seen

    def start(self, job: Job) -> None:
        self.job = job
        self.seen.append(f"start {job.config.tree['seed']}")

    def poll(self, timeout_s: float) -> int | None:
        code, status = self.outcome.get(self.job.config.tree["seed"], (0, "completed"))
        metrics = {"last": {"eval/accuracy": 1 / self.job.config.tree["seed"]}}
        write_json(
            self.job.run_folder.result, {"status": status, "metrics": metrics, "headline": {"metric": "eval/accuracy", "goal": "max"}}
        )
        self.seen.append(f"end {self.job.config.tree['seed']}")
        return code

    def stop(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def end(self) -> None:
        self.seen.append("free")


def sweep(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, outcome: dict[int, tuple[int, str]] | None = None
) -> tuple[int, list[str]]:
    """Run a sweep whose jobs are not real; return the exit code and what happened in which order."""
    seen: list[str] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ddp-train", *arguments])
    place = FakeRunner(lambda job: 0, slots=lambda folder, count: [FakeSlot(outcome or {}, seen) for _ in range(count)])
    return app.run(sys.argv[1:], place), seen


def test_a_stop_ends_a_sweep_and_resuming_runs_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = {1: (1, "failed"), 3: (130, "interrupted")}
    code, seen = sweep(monkeypatch, tmp_path, "-m", "seed=1,2,3,4", "cluster=cpu", "hydra.sweep.dir=s", outcome=outcome)
    assert code == 130
    assert seen == ["start 1", "end 1", "start 2", "end 2", "start 3", "end 3", "free"]
    code, seen = sweep(monkeypatch, tmp_path, "resume", "s")
    assert code == 0
    assert seen == ["start 1", "end 1", "start 3", "end 3", "start 4", "end 4", "free"]
    code, seen = sweep(monkeypatch, tmp_path, "-m", "seed=4,5", "cluster=cpu", "hydra.sweep.dir=s")  # the same folder, one value more
    assert (code, seen) == (0, ["start 5", "end 5", "free"])
    assert sorted(path.name for path in (tmp_path / "s").iterdir() if path.is_dir()) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a sampler's")])
@pytest.mark.parametrize("arguments", [["hydra.run.dir=there"], ["-m", "seed=1,2", "hydra.sweep.dir=there"]])
def test_an_error_after_the_start_is_not_called_a_mistake_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: Exception
) -> None:
    def break_off(*given: object) -> int:
        raise error

    slot = FakeSlot({}, [])
    monkeypatch.setattr(slot, "poll", break_off)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddp-train", "cluster=cpu", *arguments])
    code = app.run(sys.argv[1:], FakeRunner(break_off, slots=lambda folder, count: [slot]))
    assert code == (78 if isinstance(error, OSError) else 1)
    shown = capsys.readouterr().err
    assert str(error) in shown and "`ddp-train resume there` continues it" in shown
    assert "nothing was started" not in shown
    assert ("Traceback" in shown) == isinstance(error, ValueError)


def test_before_the_start_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(location, "claim_typed", full)
    assert command_line(monkeypatch, tmp_path, "cluster=cpu", "hydra.run.dir=there") == (78, [])
    assert "nothing was started" in capsys.readouterr().err


def test_slots_are_filled_as_they_become_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, seen = sweep(monkeypatch, tmp_path, "-m", "seed=1,2,3", "cluster=cpu", "sweep.parallel_jobs=2")
    assert code == 0
    assert seen == ["start 1", "end 1", "start 2", "end 2", "start 3", "end 3", "free", "free"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seed=1,-1,2"], "seed: is -1 (in the job seed=-1"),
        (["seed=1,2", "hydra.sweep.subdir=same"], "two jobs of the sweep have the folder"),
        (["seed=1,2", "resume=somewhere"], "names one run, but this is a sweep"),
        (["seed=1,2", "sweep.on_failure=retyr"], "sweep.on_failure=retry"),
        (["seed=1,2", "hydra/launcher=basic"], "hydra/launcher=ddp_train"),
        (["seed=1,2", "cluster.device=cuda", "sweep.parallel_jobs=99"], "sweep.parallel_jobs"),
    ],
)
def test_a_wrong_sweep_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(devices, "ask_driver", lambda: devices.GpuInventory(gpus=("NVIDIA H100", "NVIDIA H100")))
    code, seen = sweep(monkeypatch, tmp_path, "-m", *arguments, "cluster.processes_per_node=1")
    assert (code, seen) == (2, [])
    assert said in capsys.readouterr().err
    assert "basic" in str(arguments) or not list(tmp_path.glob("outputs/default/sweeps/*"))


def test_options_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "wide.yaml").write_text("defaults: [mlp]\nwidth: 999\n")
    code, seen = sweep(monkeypatch, tmp_path, "model=wide", "-m", "seed=1,2", "--config-dir=mine", "cluster=cpu")
    assert (code, seen) == (0, ["start 1", "end 1", "start 2", "end 2", "free"])


def test_a_job_whose_folder_is_gone_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, tmp_path, "-m", "seed=1,2,3", "cluster=cpu", "hydra.sweep.dir=s", outcome={1: (130, "interrupted")})
    shutil.rmtree(tmp_path / "s" / "1")
    code, seen = sweep(monkeypatch, tmp_path, "resume", "s")
    assert code == 1
    assert seen == ["start 1", "end 1", "start 3", "end 3", "free"]
    assert "job 1 cannot be run" in capsys.readouterr().err


def test_a_metric_that_no_job_has_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(monkeypatch, tmp_path, "-m", "seed=1,2", "cluster=cpu", "sweep.metric=eval/acuracy")
    assert "it has eval/accuracy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=mnist", "data.root=${hydra:runtime.cwd}/x"],
        ["+extra.models=3", "+extra.seeds=[1,2]"],
        ["+extra.lookup={1:2}"],
        ["objective._target_=torch.nn.functional.cross_entropy", "+objective._partial_=true", "~objective.label_smoothing"],
        ["~data.eval"],
        ["~metrics.console", "~metrics.jsonl", "~metrics.tensorboard"],
        ["callbacks=ema", "~callbacks.ema"],
        ["optimizer.lr=1"],
        ["optimizer.fused=null"],
        [
            *["model._target_=torch.nn.Linear", "~model.image_shape", "~model.num_classes", "~model.width", "~model.dropout"],
            *["+model.in_features=3", "+model.out_features=3", "+model.device=null"],
        ],
    ],
)
def test_what_is_right_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str]) -> None:
    assert command_line(monkeypatch, tmp_path, *overrides)[0] == 0


@pytest.mark.parametrize(("override", "said"), [("model=convnet", "is a group"), ("nope=3", "is not a key"), ("seed", "has no value")])
def test_a_wrong_override_of_a_resumed_run_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    command_line(monkeypatch, tmp_path, "hydra.run.dir=run")
    before = (tmp_path / "run/config.yaml").read_text()
    assert command_line(monkeypatch, tmp_path, "resume", "run", override) == (2, [])
    assert said in capsys.readouterr().err
    assert (tmp_path / "run/config.yaml").read_text() == before
    assert command_line(monkeypatch, tmp_path, "resume", "run/checkpoints/step_00000099") == (2, [])


def test_hydras_own_options_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "wide.yaml").write_text("defaults: [mlp]\nwidth: 999\n")
    for arguments in (["--config-dir=my_conf"], [f"hydra.searchpath=[file://{tmp_path}/my_conf]"]):
        _, jobs = command_line(monkeypatch, tmp_path, *arguments, "model=wide", "+extra.of.mine=3")
        assert jobs[0].config.tree["model"]["width"] == 999
        assert jobs[0].config.tree["extra"] == {"of": {"mine": 3}}
    (tmp_path / "my_conf" / "other.yaml").write_text("defaults: [config, _self_]\nseed: 77\n")
    _, jobs = command_line(monkeypatch, tmp_path, "--config-dir=my_conf", "--config-name=other")
    assert jobs[0].config.tree["seed"] == 77


@pytest.mark.parametrize(("words", "code", "said"), [([], 0, ""), (["optimizer.lrr=3"], 2, "did you mean optimizer.lr=3?")])
def test_checking_components_of_ours_and_torchs_imports_no_torch(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    run = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
    run += "from ddp_train.cli import main as app; from tests.fake_runner import FakeRunner\n"
    run += f"sys.argv[1:] = ['cluster=cpu', *{words!r}]\ncode = app.run(sys.argv[1:], FakeRunner())\n"
    run += "assert 'torch' not in sys.modules\nsys.exit(code)"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stderr, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--info", "defaults"], ["-sc", "query=bash"]])
def test_asking_hydra_imports_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {arguments!r}\n"
    code += "from ddp_train.cli import main as app\ncode = app.main()\nassert 'torch' not in sys.modules\nsys.exit(code)"
    environment = {**os.environ, "COMP_LINE": "ddp-train mod", "COMP_POINT": "13"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model" in done.stdout
    assert not list(tmp_path.iterdir())
