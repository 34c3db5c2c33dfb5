"""Sweeps: every job a full multi-process job, the same whichever way it is run, and none lost whatever happens to another."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import FEW, TINY, Finished, Project, finish, metrics, our_processes, wait_for
from tests.distributed.test_failure import FRAGILE, USE_FRAGILE, pid_of

pytestmark = pytest.mark.distributed

TWO_RANKS = ["--standalone", "--nproc-per-node=2"]
FRAGILE_JOBS = ["model=mlp", *USE_FRAGILE[:4], *FEW, "trainer.max_steps=6", "sanity_check=false"]  # which would be two forwards more


def the_sweep(project: Project) -> Path:
    """Return the only sweep folder."""
    found = [path.parent for path in project.folder.glob("outputs/**/sweep.json")]
    assert len(found) == 1, f"one sweep expected, found {found}"
    return found[0]


def jobs(sweep: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((sweep / "sweep.json").read_text())["jobs"]
    return found


def statuses(sweep: Path) -> list[str]:
    return [job["status"] for job in jobs(sweep)]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in metrics(run)]


WAYS = {
    "one by one": (["cluster=cpu"], None),
    "parallel": (["cluster=cpu", "sweep.parallel_jobs=2"], None),
    "torchrun": ([], TWO_RANKS),
}


TOUCHES_CUDA = """
import os
import torch
from ddp_train.model.mlp import MLP

# What torch.cuda.is_available() does where there is a GPU.
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))

class Touching(MLP):
    def forward(self, images):
        assert not torch.cuda._is_in_bad_fork()
        return super().forward(images)
"""


def test_a_sweep_is_the_same_whichever_way_it_is_run(project: Project) -> None:
    project.write("touches_cuda.py", TOUCHES_CUDA)
    swept = ["-m", *TINY, "model._target_=touches_cuda.Touching", "trainer.max_steps=3", "model.width=8,16", "seed=1,1"]
    seen: dict[str, list[list[float]]] = {}
    for way, (arguments, torchrun) in WAYS.items():
        done = project.run(*swept, *arguments, f"hydra.sweep.dir='{way}'", torchrun=torchrun)
        assert done.returncode == 0, done.output
        sweep = project.folder / way
        assert statuses(sweep) == ["completed"] * 4
        folders = [sweep / str(number) for number in range(4)]
        assert sorted(path.parent for path in sweep.rglob(".hydra")) == folders
        assert [yaml.safe_load((run / "config.yaml").read_text())["model"]["width"] for run in folders] == [8, 8, 16, 16]
        assert all(len(list((run / "logs").iterdir())) == 2 for run in folders)
        logs = ["new interpreter" in (run / "logs/rank_00000.log").read_text() for run in folders]
        assert logs == [way == "torchrun"] * 4  # where the process that becomes rank 0 has checked the config, and imported the module
        seen[way] = [losses(run) for run in folders]
        assert seen[way][0] == seen[way][1] != seen[way][2] == seen[way][3]  # nothing of a job is left in the next
    assert len({json.dumps(found) for found in seen.values()}) == 1
    alone = project.run(*TINY, "trainer.max_steps=3", "model.width=16", "seed=1", "cluster=cpu")
    assert alone.returncode == 0, alone.output
    assert losses(project.folder / "one by one/3") == next(
        losses(run) for run in project.runs() if "sweeps" not in str(run) and run.parts[-2] == "default"
    )
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == {"job", "model.width", "seed", "status", "eval/accuracy", "seconds"}
    accuracies = [float(row["eval/accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert "means    ddp-train runs --group" in done.output and "best     job" not in done.output  # no lucky seed is the best


def check_faults(project: Project, done: Finished) -> None:
    assert done.returncode == 1, done.output
    sweep = the_sweep(project)
    assert statuses(sweep) == ["completed", "failed", "failed", "failed", "completed"]
    reports = [json.loads((sweep / str(number) / "failure.json").read_text()) for number in (1, 2, 3)]
    assert [report["error"] for report in reports] == ["ValueError", "SIGKILL", "NonFiniteLossError"]
    assert [report["rank"] for report in reports[:2]] == [1, 1]
    for number, said in ((1, "the third forward of rank 1"), (2, "ended by SIGKILL"), (3, "the training loss is nan")):
        assert said in done.output
        assert done.output.index(f"job {number} failed") < done.output.index(said)
    assert losses(sweep / "0") == losses(sweep / "4")


def test_a_failing_job_takes_no_other_along(project: Project) -> None:
    project.write("fragile.py", FRAGILE)
    swept = ["-m", *FRAGILE_JOBS, "+model.fault=none,raise,SIGKILL,poison,none"]
    check_faults(project, project.run(*swept, "cluster=cpu", "sweep.parallel_jobs=2"))


@pytest.mark.long
def test_nor_does_it_under_torchrun(project: Project) -> None:
    project.write("fragile.py", FRAGILE)
    swept = ["-m", *FRAGILE_JOBS, "+model.fault=none,raise,SIGKILL,poison,none"]
    check_faults(project, project.run(*swept, torchrun=TWO_RANKS))


@pytest.mark.long
def test_a_sweep_stops_at_a_failure_or_tries_again_when_told_to(project: Project) -> None:
    project.write("fragile.py", FRAGILE)
    stopped = project.run("-m", *FRAGILE_JOBS, "+model.fault=raise,none", "cluster=cpu", "sweep.on_failure=stop", "hydra.sweep.dir=stopped")
    assert stopped.returncode == 1, stopped.output
    assert statuses(project.folder / "stopped") == ["failed", "queued"]
    # the cause is mended: resuming runs the failed job again, and the one that never ran
    project.write("fragile.py", FRAGILE.replace("if self.calls == 3", "if False"))
    mended = project.run("resume", "stopped")
    assert mended.returncode == 0, mended.output
    assert statuses(project.folder / "stopped") == ["completed", "completed"]
    assert [job["attempts"] for job in jobs(project.folder / "stopped")] == [2, 1]

    project.write("fragile.py", FRAGILE.replace('== "1":', '== "1" and self.fault != "none" and mark():') + MARK)
    tried = project.run(
        *["-m", *FRAGILE_JOBS, "+model.fault=none,SIGKILL", "cluster=cpu", "sweep.on_failure=retry", "checkpoint.every_steps=1"],
        *["hydra.sweep.dir=tried", "checkpoint.asynchronous=false"],
    )
    assert tried.returncode == 0, tried.output
    assert [job["attempts"] for job in jobs(project.folder / "tried")] == [1, 2]
    assert losses(project.folder / "tried/0") == losses(project.folder / "tried/1")  # it went on from its checkpoint
    assert "resumed  after step" in (project.folder / "tried/1/logs/rank_00000.log").read_text()


MARK = """
from pathlib import Path

def mark():
    is_first = not Path("marked").exists()
    Path("marked").touch()
    return is_first
"""


@pytest.mark.long
def test_a_killed_sweep_continues_where_it_was_with_the_configs_that_it_had(project: Project) -> None:
    project.write("mine/model/mine.yaml", "_target_: ddp_train.model.mlp.MLP\nimage_shape: auto\nnum_classes: auto\nwidth: 16\n")
    swept = ["--config-dir=mine", "-m", "model=mine", *FEW, "trainer.max_steps=60", "checkpoint.every_steps=10", "cluster=cpu"]
    swept += ["optimizer.lr=0.1,0.03,0.01,0.003,0.001", "trainer.max_epochs=null"]
    process = project.start(*swept, "hydra.sweep.dir=sweep")
    sweep = project.folder / "sweep"
    wait_for(lambda: (sweep / "2/checkpoints/step_00000020").exists())
    project.write("mine/model/mine.yaml", "_target_: nothing.like.it\n")
    process.send_signal(signal.SIGKILL)
    finish(process)
    wait_for(lambda: not our_processes(project.folder), timeout_s=3)
    before = {run.name: (run / "result.json").read_text() for run in sweep.glob("[01]")}
    assert statuses(sweep) == ["completed", "completed", "running", "queued", "queued"]

    done = project.run("resume", "sweep")
    assert done.returncode == 0, done.output
    assert statuses(sweep) == ["completed"] * 5
    assert [job["attempts"] for job in jobs(sweep)] == [1, 1, 2, 1, 1]
    assert {run.name: (run / "result.json").read_text() for run in sweep.glob("[01]")} == before  # nothing is run twice
    assert "resumed  after step" in (sweep / "2/logs/rank_00000.log").read_text()
    assert all([record["step"] for record in metrics(sweep / str(number), "train")] == list(range(1, 61)) for number in range(5))
    again = project.run("resume", "sweep")
    assert again.returncode == 0, again.output
    assert [job["attempts"] for job in jobs(sweep)] == [1, 1, 2, 1, 1]


LONG = ["trainer.max_steps=100000", "trainer.max_epochs=null", "trainer.log_every_steps=1"]


def test_ctrl_c_lets_every_running_job_save_and_a_second_one_ends_it_at_once(project: Project) -> None:
    swept = ["-m", *TINY, *LONG, "optimizer.lr=0.1,0.01,0.001", "cluster=cpu", "cluster.processes_per_node=1", "loader.num_workers=1"]
    process = project.start(*swept, "sweep.parallel_jobs=2", "hydra.sweep.dir=sweep")
    sweep = project.folder / "sweep"
    runs = [sweep / number for number in "01"]
    wait_for(lambda: all((run / "metrics.jsonl").exists() and metrics(run, "train") for run in runs))  # a step each
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout=20)
    assert done.returncode == 130, done.output
    assert statuses(sweep) == ["interrupted", "interrupted", "queued"]
    for number in "01":
        step = json.loads((sweep / number / "result.json").read_text())["step"]
        assert (sweep / number / f"checkpoints/step_{step:08d}/COMPLETE").exists()
    assert "`ddp-train resume sweep` runs them" in done.stdout

    process = project.start("resume", "sweep")
    wait_for(lambda: statuses(sweep)[0] == "running" and "resumed  after step" in (sweep / "0/logs/rank_00000.log").read_text())
    ranks = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_rank_of(path, project.folder, process.pid)]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)  # nothing that is asked of them is answered
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert finish(process, timeout=5).returncode == 130
    wait_for(lambda: not our_processes(project.folder), timeout_s=3)
    assert "failed" not in statuses(sweep)


def is_rank_of(path: Path, folder: Path, launcher: int) -> bool:
    try:
        command = (path / "cmdline").read_bytes()
        is_helper = b"multiprocessing" in command or b"watchdog" in command  # which ends with its rank, but not stopped while it starts
        return (path / "cwd").resolve() == folder.resolve() and int(path.name) != launcher and not is_helper
    except OSError:
        return False  # it has just ended, or is not ours


@pytest.mark.long
def test_under_torchrun_a_restarted_group_continues_its_sweep(project: Project) -> None:
    project.write("mine/model/mine.yaml", "_target_: ddp_train.model.mlp.MLP\nimage_shape: auto\nnum_classes: auto\nwidth: 16\n")
    swept = ["--config-dir=mine", "-m", "model=mine", *FEW, "trainer.max_steps=150", "trainer.max_epochs=null", "checkpoint.every_steps=10"]
    process = project.start(*swept, "optimizer.lr=0.1,0.01,0.001", torchrun=[*TWO_RANKS, "--max-restarts=2"])
    wait_for(lambda: any(project.folder.glob("outputs/default/sweeps/*/1/checkpoints/step_00000020")))
    project.write("mine/model/mine.yaml", "_target_: nothing.like.it\n")
    os.kill(pid_of(0, process.pid), signal.SIGKILL)  # the process in which Hydra runs
    done = finish(process)
    assert done.returncode == 0, done.output
    sweep = the_sweep(project)
    assert statuses(sweep) == ["completed"] * 3
    assert [job["attempts"] for job in jobs(sweep)] == [1, 2, 1]
    assert "restart 1 of 2 continues the sweep" in done.output


def test_mistakes_of_any_job_are_shown_before_the_first_starts(project: Project) -> None:
    done = project.run("-m", *TINY, "cluster=cpu", "trainer.max_steps=2,0,3", "loader.micro_batch_size=1,-1")
    assert done.returncode == 2, done.output
    assert "trainer.max_steps: is 0 (in the job" in done.output
    assert "loader.micro_batch_size: is -1 (in the job" in done.output
    assert done.output.count("expected: at least 1") == 2
    assert not list(project.folder.rglob("sweeps/*"))


LEAKY = """
import os, signal, sys, threading, time, warnings
from pathlib import Path
import torch
from torch import nn
from ddp_train.model.mlp import MLP

KEPT = []

@torch.library.custom_op("leaky::same", mutates_args=())  # which a process can register once
def same(values: torch.Tensor) -> torch.Tensor:
    return values.clone()

class Leaky(MLP):
    def __init__(self, leaks, **arguments):
        super().__init__(**arguments)
        if leaks:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            torch.set_num_threads(3)
            torch.set_default_device("cpu")
            torch.set_float32_matmul_precision("medium")
            torch.set_grad_enabled(True)
            os.environ["LEAKED"] = "yes"
            sys.path.insert(0, "/nowhere")
            warnings.simplefilter("error")
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            KEPT.append(open("leaked.txt", "w"))
            threading.Thread(target=time.sleep, args=(60,), name="leaked", daemon=True).start()
            nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output)
        else:
            state = [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads() == 3]
            state += [torch.get_float32_matmul_precision(), "LEAKED" in os.environ, "/nowhere" in sys.path]
            state += [len(KEPT), len(nn.modules.module._global_forward_hooks)]
            state.append(len(torch.overrides._get_current_function_mode_stack()))
            state += [signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, any(each[0] == "error" for each in warnings.filters[:1])]
            state.append(any(path.exists() and path.resolve().name == "leaked.txt" for path in Path("/proc/self/fd").iterdir()))
            state.append(any(thread.name == "leaked" for thread in threading.enumerate()))
            print("STATE", state, flush=True)
"""


def test_a_job_sees_nothing_of_the_one_before(project: Project) -> None:
    project.write("leaky.py", LEAKY)
    leaky = ["model._target_=leaky.Leaky", "+model.leaks=false,true,false"]
    done = project.run("-m", *TINY, *leaky, "trainer.max_steps=2", "cluster=cpu", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.output
    states = []
    for number in (0, 2):
        log = (project.folder / f"sweep/{number}/logs/rank_00001.log").read_text()
        states.append([line for line in log.splitlines() if line.startswith("STATE")])
    assert states[0] == states[1]
    assert len(states[0]) == 1
    assert losses(project.folder / "sweep/0") == losses(project.folder / "sweep/2")


@pytest.mark.long
def test_runs_started_at_once_have_a_folder_and_a_result_each(project: Project) -> None:
    count = 10
    short = [*TINY, "trainer.max_steps=2", "cluster=cpu", "cluster.processes_per_node=1"]
    done = [finish(process, timeout=200) for process in [project.start(*short, f"seed={number}") for number in range(count)]]
    assert [each.returncode for each in done] == [0] * count, [each.output for each in done if each.returncode]
    assert len(project.runs()) == count
    seeds = {yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in project.runs()}
    assert seeds == set(range(count))
    assert all(json.loads((run / "result.json").read_text())["status"] == "completed" for run in project.runs())


@pytest.mark.long
def test_optuna_drives_jobs_and_is_resumed_through_its_storage(project: Project) -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra `optuna`")
    project.write("mine/optimizer/mine.yaml", "_target_: torch.optim.AdamW\n_partial_: true\nlr: 0.001\n")
    swept = [
        "--config-dir=mine",
        "-m",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=12",
        "hydra.sweeper.sampler.seed=1",
        "optimizer=mine",
    ]
    swept += [*FEW, "trainer.max_steps=3"]
    swept += ["model=mlp,convnet", "optimizer.lr=tag(log,interval(0.0001,0.1))", "cluster=cpu", "hydra.sweep.dir=sweep", "model.width=8"]
    process = project.start(*swept)
    sweep = project.folder / "sweep"
    wait_for(lambda: (sweep / "5/metrics.jsonl").exists())
    process.send_signal(signal.SIGKILL)
    finish(process)
    finished = statuses(sweep).count("completed")
    project.write("mine/optimizer/mine.yaml", "_target_: nothing.like.it\nlr: 0.001\n")  # trials to come are composed from what was there
    done = project.run("resume", "sweep", timeout=200)
    assert done.returncode == 0, done.output
    assert statuses(sweep) == ["completed"] * 12
    assert finished >= 4
    study = optuna.load_study(study_name="default", storage=f"sqlite:///{sweep}/optuna.db")
    told = {trial.value for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE}
    assert sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials) == 12
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE  # as the objective says of accuracy
    assert told == {job["metric"] for job in jobs(sweep)}
    assert f"best     job {max(jobs(sweep), key=lambda job: (job['metric'], -job['number']))['number']}: eval/accuracy" in done.output
    for job in jobs(sweep):
        tree = yaml.safe_load((sweep / job["folder"] / "config.yaml").read_text())
        assert f"optimizer.lr={tree['optimizer']['lr']}" in job["overrides"]
        assert len({line for rank in (0, 1) for line in [(sweep / job["folder"] / f"logs/rank_{rank:05d}.log").read_text()] if line}) == 2
