"""Every command of README is run to its end as it is typed, with a word behind it that keeps it short; or a test is named that runs it.

What needs a cluster is run by the tests of clusters; so a command that is neither typed here nor in `ELSEWHERE` fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_train.config.command.commands import COMMANDS
from tests.conftest import TINY, Project, finish
from tests.docs.pages import ROOT, Command, commands, inline, write_files

README = ROOT / "README.md"
BESIDE = Path(sys.executable).parent
"""The folder of `ddp-train` and `torchrun` of this environment."""

SHORT = "trainer.max_steps=2"
QUICK = (["ddp-train", "help"], ["ddp-train", "plan"])
"""Commands that the default tests type; the others take seconds each."""

ELSEWHERE = {
    "git clone <this repository> && cd ddp_train": ".ci/run",  # which stands in what it makes
    "make test": ".ci/run::make test",
    "make check": ".ci/run::make check",
    "pip install .": "tests/distributed/test_starter.py::environment",
    "tensorboard --logdir outputs": "tests/unit/metrics/test_tensorboard.py::test_tensorboard_has_scalars_config_and_hyper_parameters",
    "torchrun --nnodes=2 --nproc-per-node=8 ... -m ddp_train": (
        "tests/cluster/test_torchrun_hosts.py::test_a_killed_rank_starts_again_on_both_machines"
    ),
    "ddp-train cluster=slurm_a100 cluster.nodes=2": (
        "tests/cluster/test_slurm.py::test_two_nodes_of_two_processes_give_the_losses_of_one_machine"
    ),
    "ddp-train cluster=ssh cluster.hosts=[a,b] cluster.device=cuda cluster.processes_per_node=8": (
        "tests/cluster/test_ssh.py::test_three_machines_have_the_losses_of_one"
    ),
    "ddp-train cluster=machines cluster.nodes=2 cluster.rendezvous_endpoint=node0:29400": (
        "tests/cluster/test_hosts.py::test_the_machine_of_the_endpoint_is_the_first_and_all_end_with_one_code"
    ),
    "ddp-train cluster=machines": "tests/distributed/test_cluster.py::test_machines_meet_as_an_operators_environment_says",
}
"""Commands that need other machines, an engine or a network, and what runs them."""

SHOWN = {" ".join(command.words): command for command in (*commands(README), *inline(README))}
HERE = [
    pytest.param(command, id=text, marks=[] if command.words[:2] in QUICK else pytest.mark.long)
    for text, command in SHOWN.items()
    if text not in ELSEWHERE
]


@pytest.mark.parametrize(("text", "reference"), ELSEWHERE.items(), ids=[*ELSEWHERE])
def test_what_is_run_elsewhere_is_shown_and_has_its_test(text: str, reference: str) -> None:
    assert text in SHOWN
    file, _, name = reference.partition("::")
    assert (f"def {name}(" if file.endswith(".py") else name) in (ROOT / file).read_text()


@pytest.mark.parametrize("command", HERE)
def test_a_command_runs_to_its_end(command: Command, project: Project) -> None:
    if "hydra/sweeper=optuna" in command.words:
        pytest.importorskip("optuna", reason="needs the extra `optuna`")
    write_files(README, project.folder)
    words = [word for word in command.words if word != "..."]  # which stands for words like those above it
    typed = command.typed_at_ddp_train()
    if words == ["make", "train"]:  # without what installs; CI has done that
        words += [f"--file={ROOT / 'Makefile'}", "--old-file=.venv/.ready", f"BIN={BESIDE}", f"ARGS={SHORT}"]
    elif words[-1] == "RUN":
        assert project.run(*TINY, "trainer.max_steps=1").returncode == 0
        words[-1:] = [str(project.the_run()), SHORT]
    elif typed is not None and not {*typed} & {*COMMANDS}:
        words.append(SHORT)
    env = {**os.environ, "PATH": f"{BESIDE}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = finish(subprocess.Popen(words, cwd=project.folder, env=env, text=True, **pipes), timeout=600)
    assert done.returncode == 0, f"{command}\n{done.output}"
    results = [json.loads(file.read_text()) for file in project.folder.glob("outputs/**/result.json")]
    trains = words[0] == "make" or any(SHORT in word for word in words)
    assert bool(results) == trains
    assert {(result["status"], result["step"]) for result in results} <= {("completed", 2)}
