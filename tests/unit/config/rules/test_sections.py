"""Callbacks that cannot work are refused before any process starts."""

from __future__ import annotations

import pytest

from ddp_train.config.rules import sections
from ddp_train.config.rules.sections import check_copies
from ddp_train.errors import ConfigErrors
from ddp_train.interfaces import Callback
from tests.conftest import TINY, Project
from tests.unit.config.clusters import cluster_with
from tests.unit.parts import checked

HERE = "tests.unit.config.rules.test_sections"


class Foreign:
    """A callback of another trainer."""

    def evaluate(self) -> None: ...


class Idle(Callback):
    """It inherits from our class, and has no event of its own."""

    def evaluate(self) -> None: ...


class Fine:
    def on_step(self, run: object) -> None: ...


@pytest.mark.parametrize("name", ["Foreign", "Idle"])
def test_a_class_that_would_never_be_called_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigErrors, match=r"has none of the methods on_start, on_step, on_evaluation, on_save, on_end: it would never be called"
    ):
        checked(f"+callbacks.mine._target_={HERE}.{name}")
    assert checked(f"+callbacks.mine._target_={HERE}.Fine").callbacks == {"mine": {"_target_": f"{HERE}.Fine"}}


def test_early_stopping_needs_an_evaluation_and_freeze_its_patterns() -> None:
    with pytest.raises(ConfigErrors, match=r"callbacks\.early_stopping: follows a metric") as caught:
        checked("callbacks=[early_stopping,freeze]", "data.eval=null", base=["model=mlp"])
    assert "callbacks.freeze.patterns" in str(caught.value)


def test_ours_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sections, "look_up_or_none", asked.append)
    checked("callbacks=ema", f"+callbacks.mine._target_={HERE}.Fine")
    assert asked == [f"{HERE}.Fine"]


def test_several_options_and_one_are_composed() -> None:
    assert checked().callbacks == {}
    assert list(checked("callbacks=[ema,early_stopping]").callbacks) == ["ema", "early_stopping"]
    assert list(checked("callbacks=ema", "+callbacks.again._target_=ddp_train.callbacks.learning_rate.LearningRate").callbacks) == [
        "ema",
        "again",
    ]


def test_a_rule_ends_where_it_reads_an_invalid_section_and_all_others_are_asked() -> None:
    with pytest.raises(ConfigErrors) as caught:
        checked(
            "trainer.max_steps=0", "loader.num_workers=1", "loader.on_device=true", "evaluation.save_predictions=true", "data.eval=null"
        )
    assert [error.key for error in caught.value.errors] == ["trainer.max_steps", "loader.num_workers", "evaluation.save_predictions"]


def test_batch_sizes_that_contradict_each_other_are_said_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        checked("trainer.global_batch_size=7", "trainer.grad_accum_steps=3", "loader.num_workers=1", "loader.on_device=true")
    assert sorted(error.key for error in caught.value.errors) == ["loader.num_workers", "trainer.global_batch_size"]


TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}
POD = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}


def problems(environment: dict[str, str], **cluster: object) -> list[str]:
    return [str(error) for error in check_copies(cluster_with(**{"launcher": "local", "nodes": 1, **cluster}), environment)]


@pytest.mark.parametrize(
    ("environment", "said", "meant"),
    [
        (
            TASK,
            "SLURM_STEP_NUM_TASKS=2 says that srun has started 2 of this command",
            "srun --ntasks-per-node=1 ddp-train cluster=machines",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            "mpirun has started 4",
            "mpirun --map-by ppr:1:node ddp-train cluster=",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2 says that mpiexec has started 2", "mpiexec -ppn 1 ddp-train cluster=machines"),
        (POD, "WORLD_SIZE=4 says", "cluster=machines cluster.nodes=$WORLD_SIZE cluster.node_rank=$RANK"),
        ({"NNODES": "2"}, "NNODES=2 says that the run has 2 machines", "ddp-train cluster=machines ..."),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 says that the run has 4 machines", "ddp-train cluster=machines ..."),
    ],
)
def test_what_proves_several_copies_is_refused_with_the_command_that_was_meant(environment: dict[str, str], said: str, meant: str) -> None:
    [problem] = problems(environment)
    variable = said.partition("=")[0] if "=" in said else "OMPI_COMM_WORLD_SIZE"
    assert said in problem and meant in problem and f"env -u {variable} ddp-train" in problem
    assert problems(environment, launcher="machines") == [problem]  # of one machine alone: each copy would be one
    for launcher, nodes in (("machines", 2), ("slurm", 2), ("ssh", 2)):
        assert problems(environment, launcher=launcher, nodes=nodes) == []
    ours = {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0"}  # a rank of any agent
    assert problems({**environment, **ours}) == []


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SCRIPT,
        {**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "2"},  # of newer SLURM
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {**TASK, "SLURM_PTY_PORT": "33449"},  # srun -N2 --pty bash: somebody types in the first task's shell
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"},  # a shell in salloc
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "NNODES": "1", "PET_NNODES": "1:1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},  # no rank has it
        {"RANK": "3"},
        {"NNODES": "", "PET_NNODES": "two", "PMI_SIZE": "x"},
        {"NPROC_PER_NODE": "4", "MASTER_ADDR": "m"},
    ],
)
def test_what_proves_nothing_is_no_obstacle(environment: dict[str, str]) -> None:
    assert problems(environment) == []


def test_several_tasks_on_a_node_are_refused_over_several_machines_too() -> None:
    double = {**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4"}
    [problem] = problems(double, launcher="machines", nodes=None)
    assert "srun starts 2 tasks on a node" in problem
    assert problems(TASK, launcher="machines", nodes=None) == []  # two machines, as the step says
    assert problems({**double, "TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0"}, launcher="machines", nodes=None) == []


def test_a_sweep_is_refused_before_it_has_a_folder(project: Project) -> None:
    done = project.run("-m", "seed=1,2", *TINY, env=POD)
    assert done.returncode == 2 and "WORLD_SIZE=4 says that 4 of this command run" in done.output, done.output
    assert not (project.folder / "outputs").exists()
