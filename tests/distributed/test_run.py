"""One run, whichever way it is started: one folder, the same files, the same numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ddp_train import FOLDER
from tests.conftest import TINY, Project, finish, metrics

pytestmark = pytest.mark.distributed

FILES = [
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    ".hydra/overrides.yaml",
    "checkpoints/step_00000004/COMPLETE",
    "checkpoints/step_00000004/manifest.json",
    "checkpoints/step_00000004/rank_*.safetensors",
    "code.json",
    "code.tar.gz",
    "config.yaml",
    "environment.json",
    "logs/rank_*.log",
    "metrics.jsonl",
    "result.json",
    "tensorboard/events.*",
    "times.jsonl",
]
SHORT = [override for override in TINY if override != "~metrics.tensorboard"] + ["trainer.max_steps=4"]


def files(run: Path, world_size: int) -> list[str]:
    """Return the files of a run, the ones that each rank has folded into one name."""
    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    for pattern in ("logs/rank_{:05d}.log", "checkpoints/step_00000004/rank_{:05d}.safetensors"):
        ranks = [pattern.format(rank) for rank in range(world_size)]
        assert set(ranks) <= set(names)
        names = [name for name in names if name not in ranks] + [pattern.replace("{:05d}", "*")]
    return sorted("tensorboard/events.*" if name.startswith("tensorboard/") else name for name in names)


def script(project: Project, name: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start one of the scripts for people who use torchrun themselves, with the programs that are installed beside this interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(FOLDER.parent / "launch" / name), *words],
        cwd=project.folder,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


IMPORTED = """
import sys

class Imported:
    def on_step(self, run):
        if run.step == 3:
            print("imported by then:", {"torch._dynamo", "sympy"} & {*sys.modules})
"""


@pytest.mark.parametrize("torchrun", [None, ["--standalone", "--nproc-per-node=1"]], ids=["ddp-train", "torchrun"])
def test_one_process_trains_without_importing_the_compiler(project: Project, torchrun: list[str] | None) -> None:
    project.write("imported.py", IMPORTED)
    cluster = [] if torchrun else ["cluster=cpu", "cluster.processes_per_node=1"]
    saved = ["checkpoint.every_steps=1", "+callbacks.imported._target_=imported.Imported"]
    done = project.run(*SHORT, *cluster, *saved, torchrun=torchrun)
    assert done.returncode == 0, done.output
    assert "imported by then: set()" in done.stdout


NOTES_MODULES = """
import atexit, os, sys

def note():
    names = [name for name, module in sys.modules.items() if name.startswith("ddp_train.") and not hasattr(module, "__path__")]
    with open(f"{os.path.dirname(__file__)}/{os.environ.get('RANK', 'none')}_{os.getpid()}.txt", "w") as file:
        file.write(" ".join(names))

def exit_at_once(code, leave=os._exit):
    note()
    leave(code)

os._exit = exit_at_once
atexit.register(note)
"""


def beyond_the_stories(noted: Path) -> list[list[str]]:
    """Return which of our modules a run's command and its rank 0 have imported that the five stories of architecture.md do not name."""
    text = (FOLDER.parent / "docs/architecture.md").read_text().partition("## Stories")[2].partition("Ten more")[0]
    told = {path.removesuffix(".py").replace("/", ".") for path in re.findall(r"`(ddp_train/[\w/]+(?:\.py|/))`", text)}
    imported = {file.name: file.read_text().split() for file in noted.glob("*.txt")}
    command = next(names for names in imported.values() if "ddp_train.cli.compose" in names and "ddp_train.rank.rank" not in names)
    rank = next(names for name, names in imported.items() if name.startswith("0_") and "ddp_train.rank.rank" in names)
    return [[name for name in names if not {name, f"{name.rpartition('.')[0]}."} & told] for names in (command, rank)]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_every_way_to_start_leaves_one_folder_with_the_same_files(project: Project, by_torchrun: bool, world_size: int) -> None:
    if by_torchrun:
        done = finish(script(project, "local.sh", *SHORT, PROCESSES=str(world_size)))
    else:
        (temporary := project.folder / "tmp").mkdir()
        noting = project.write("noted/sitecustomize.py", NOTES_MODULES).parent
        environment = {"TMPDIR": str(temporary), "PYTHONPATH": str(noting)}
        done = project.run(*SHORT, "cluster=cpu", f"cluster.processes_per_node={world_size}", env=environment)
        kept = [path.name.partition("_")[0] for path in temporary.iterdir()]  # one folder each for a user, whatever was started
        assert set(kept) <= {"ddp", "torchinductor"}, kept
    assert done.returncode == 0, done.output
    if not by_torchrun:
        command, rank = beyond_the_stories(noting)
        assert len(command) <= 25, command
        assert len(rank) <= 77, rank
    run = project.the_run()
    assert files(run, world_size) == FILES
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["step"], result["samples"]) == ("completed", 4, 4 * 32 * world_size)
    assert {"eval/accuracy", "eval/loss", "train/loss"} <= result["metrics"]["last"].keys()
    assert result["metrics"]["best"]["eval/accuracy"]["step"] == 4
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["world_size"], len(environment["ranks"])) == (world_size, world_size)
    assert f"global batch {32 * world_size} = micro-batch 32 x {world_size} ranks x accumulation 1" in done.stdout
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["trainer"]["global_batch_size"] == 32 * world_size
    assert (written["model"]["num_classes"], written["scheduler"]["total_steps"]) == (10, 4)  # what `auto` came to
    assert "Done: 4 steps" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith(("torch ", "warning "))]
    assert done.stdout.count("  ddp-train ") + done.stdout.count("/ddp-train ") >= 1  # what to try next


def test_the_script_starts_a_process_for_each_gpu_that_may_be_used(project: Project) -> None:
    for name, text in {"torchrun": 'echo "$@"', "nvidia-smi": "printf 'GPU 0\\nGPU 1\\nGPU 2\\n'"}.items():
        project.write(f"bin/{name}", f"#!/bin/bash\n{text}\n").chmod(0o755)
    environment = {"PATH": f"{project.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = finish(script(project, "local.sh", "a b", **environment))
    assert done.stdout == "--standalone --nproc-per-node=2 --max-restarts=0 -m ddp_train a b\n", done.output  # none: two on CPU


def test_two_runs_of_one_name_never_share_a_folder(project: Project) -> None:
    started = [project.start(*TINY, "trainer.max_steps=2", "cluster=cpu", "hydra.run.dir=outputs/same") for _ in range(2)]
    done = [finish(process) for process in started]
    assert sorted(each.returncode for each in done) == [0, 2]
    assert "another run is working in" in done[0].output + done[1].output
    assert json.loads((project.the_run() / "result.json").read_text())["status"] == "completed"


@pytest.mark.long
def test_two_machines_by_hand_that_start_seconds_apart_share_one_run(project: Project, free_port: int) -> None:
    command = [*TINY, "trainer.max_steps=3", "cluster=machines", "cluster.device=cpu", "cluster.nodes=2", "cluster.processes_per_node=1"]
    command += [f"cluster.rendezvous_endpoint=127.0.0.1:{free_port}"]
    first = project.start(*command, "cluster.node_rank=0")
    time.sleep(4)
    second = project.start(*command, "cluster.node_rank=1")
    assert [finish(process).returncode for process in (first, second)] == [0, 0]
    run = project.the_run()
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3]


def test_components_from_the_users_own_folder_work_from_the_command_line(project: Project) -> None:
    project.write(
        "mine/parts.py",
        """
import torch
from torch import nn

class Points(torch.utils.data.Dataset):
    def __init__(self, n, shift=0):
        generator = torch.Generator().manual_seed(shift)
        self.x = torch.randn(n, 4, generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.x[i].sum(0, keepdim=True)

class Line(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.map = nn.Linear(inputs, 1)
    def forward(self, x):
        return self.map(x)
""",
    )
    done = project.run(
        *["data._target_=mine.parts.Points", "~data.num_samples", "~data.split", "~data.image_size", "~data.channels"],
        *["~data.num_classes", "~data.noise", "~data.seed", "+data.n=256", "~data.eval", "+data.eval.n=50", "+data.eval.shift=1"],
        *[
            "model._target_=mine.parts.Line",
            "~model.image_shape",
            "~model.num_classes",
            "~model.width",
            "~model.dropout",
            "+model.inputs=4",
        ],
        *["objective._target_=torch.nn.MSELoss", "~objective.label_smoothing"],
        *["optimizer._target_=torch.optim.Adagrad", "~optimizer.betas", "~optimizer.fused", "optimizer.lr=0.3", "optimizer.weight_decay=0"],
        *["scheduler._target_=torch.optim.lr_scheduler.ExponentialLR", "~scheduler.warmup_steps", "~scheduler.total_steps"],
        *["~scheduler.final_ratio", "+scheduler.gamma=0.99", "trainer.max_epochs=20", "cluster=cpu", "loader.num_workers=1"],
    )
    assert done.returncode == 0, done.output
    assert metrics(project.the_run(), "eval")[-1]["loss"] < 0.05


@pytest.mark.parametrize(
    "start", [[], ["-m"], ["cluster.agent=torch"], ["+cluster.env.OMP_PLACES=cores"], ["loader.num_workers=1"]], ids=str
)
def test_a_configuration_may_be_longer_than_an_environment_variable(project: Project, start: list[str]) -> None:
    project.write("many.py", "class Many:\n    def __init__(self, values): self.values = values\n    def on_step(self, run): pass\n")
    project.write("conf/callbacks/many.yaml", yaml.safe_dump({"many": {"_target_": "many.Many", "values": [123456] * 30_000}}))
    done = project.run("--config-dir=conf", *TINY, "callbacks=many", "trainer.max_steps=1", "cluster=cpu", *start)
    assert done.returncode == 0, done.output
