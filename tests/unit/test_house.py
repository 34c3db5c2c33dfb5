"""What is said once in the house is said in one place, every module that a text names is there, and every module has its tests."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ddp_train
from ddp_train import FOLDER
from ddp_train.system import process_env

ROOT = FOLDER.parent
TORCHRUN = "|".join((*process_env.OF_TORCHRUN, "GROUP_WORLD_SIZE", r"TORCHELASTIC_\w+"))

SHOWN_BY = {
    "checkpoint/foreign_form.py": "tests/unit/cli/test_location.py, tests/unit/training/state/test_initial_weights.py",
    "cli/export.py": "tests/unit/training/inference/test_export.py",
    "cli/pytest_plugin.py": "tests/unit/cli/test_from_python.py",
    "cli/resume.py": "tests/config/test_config.py",
    "config/check.py": "tests/config/test_config.py",
    "config/schema.py": "tests/config/test_config.py",
    "config/rules/strategy.py": "tests/config/test_config.py",
    "config/command/saved_overrides.py": "tests/unit/cli/test_saved_run.py, tests/unit/cli/test_evaluate.py",
    "data/tokens/token_writer.py": "tests/unit/cli/test_prepare.py",
    "interfaces/data.py": "a seam: tests/unit/test_traits.py, tests/unit/loader/test_dataset_adapter.py",
    "interfaces/run.py": "protocols: tests/unit/training/loop/test_callbacks.py",
    "launch/agent/elastic.py": "tests/distributed/test_cluster.py",
    "launch/fork_requests.py": "tests/unit/launch/test_local.py, tests/unit/rank/test_forked.py, tests/unit/cli/test_check_process.py",
    "launch/job_runner.py": "interfaces: tests/unit/cli/test_main.py, tests/unit/cli/test_compose.py, tests/distributed/test_restart.py",
    "launch/node/attempt_agent.py": "attempts with agents that are none: tests/unit/launch/node/test_program.py",
    "launch/node/wire.py": "tests/unit/launch/node/test_registry.py",
    "loader/worker_preload.py": "what it sets holds for a process of its own: tests/unit/loader/test_worker_pool.py",
    "metrics/mlflow.py": "tests/thirdparty/test_metrics.py",
    "model_log.py": "tests/unit/training/loop/test_callbacks.py",
    "metrics/trackio.py": "tests/thirdparty/test_metrics.py",
    "metrics/wandb.py": "tests/thirdparty/test_metrics.py",
    "rank/command_group.py": "tests/distributed/test_plain_agent.py, tests/distributed/test_sweep.py",
    "rank/main.py": "tests/distributed/test_run.py, tests/distributed/test_restart.py",
    "rank/sweep_member.py": "tests/distributed/test_sweep.py, tests/distributed/test_sweep_stop.py",
    "rank/train_job.py": "tests/unit/cli/test_saved_run.py, tests/distributed/test_run.py",
    "rank/rank.py": "tests/distributed/test_run.py, tests/distributed/test_restart.py",
    "run_folder/trust.py": "tests/config/test_security.py",
    "strategy/means.py": "tests/unit/strategy/test_local_sgd.py, tests/unit/strategy/test_power_sgd.py",
    "sweep/schedule.py": "tests/config/test_config.py",
    "training/build/trainer.py": "tests/unit/training/loop/test_device_queue.py, tests/unit/training/loop/test_trainer.py",
    "training/build/data.py": "tests/unit/config/test_auto.py, tests/unit/loader/test_sampler.py, tests/distributed/test_samples.py",
    "training/parts/components.py": "tests/unit/training/parts/test_turns.py, tests/unit/training/loop/test_train_step.py",
    "training/inference/predict.py": "tests/unit/cli/test_evaluate.py",
    "training/state/weights.py": "tests/unit/training/inference/test_finished_run.py, tests/unit/training/inference/test_export.py",
    "watchdog/__main__.py": "tests/unit/watchdog/test_main.py, tests/faults/test_hang.py",
}
"""What shows the modules that have no test file of their own."""


def texts(file: Path, *, with_docstrings: bool) -> Iterator[str]:
    """Yield the texts in a source file."""
    tree = ast.parse(file.read_text())
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings, of constants too
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (with_docstrings or node not in statements):
            yield node.value


def sources() -> list[Path]:
    return sorted([*FOLDER.rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")])


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        # What /proc says of the network, the driver, the processor and the mounts is read where these are.
        ("/proc/(?!net/|driver/|self/mountinfo|cpuinfo)|^/proc$", {"system/process.py"}),
        # MASTER_ADDR is also what a cluster tells an agent: where the machines meet.
        (rf"^({TORCHRUN})$", {"system/process_env.py", "config/cluster.py", "config/rules/sections.py"}),
        ("^DDP_TRAIN_", {"system/process_env.py"}),
    ],
)
def test_what_the_system_says_is_read_in_one_place(pattern: str, places: set[str]) -> None:
    found = {
        str(file.relative_to(FOLDER))
        for file in FOLDER.rglob("*.py")
        if any(re.search(pattern, text) for text in texts(file, with_docstrings=False))
    }
    assert found == places


def test_what_is_private_of_hydra_and_omegaconf_stands_in_one_place() -> None:
    private = re.compile(r"(hydra|omegaconf)\._|BaseContainer\._")
    using = [str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.py") if private.search(file.read_text())]
    assert using == ["config/hydra_internals.py"]


def test_modules_that_are_named_in_texts_exist() -> None:
    for file in sources():
        for text in texts(file, with_docstrings=True):
            for path in re.findall(r"(?<![\w/])ddp_train/[\w/]+(?:\.py|/$)", text):
                assert (ROOT / path).exists(), f"{file}: {path}"
            for path in re.findall(r"^torch/[\w/]+(?:\.py|/$)", text):  # by which stacks are described
                assert (Path(torch.__file__).parents[1] / path).exists(), f"{file}: {path}"
            for name in re.findall(r"(?<![\w./])ddp_train\.[a-z_]+(?:\.[a-z_]+)*\b(?!\.py)", text):
                assert name.removeprefix("ddp_train.") in dir(ddp_train) or importlib.util.find_spec(name), f"{file}: {name}"


def test_what_starts_ranks_does_not_know_which_programs_there_are() -> None:
    """The doctor is one that a job names: `RankProgram`."""
    knowing = [
        file for room in ("launch", "rank") for file in (FOLDER / room).rglob("*.py") if re.search("doctor|examin", file.read_text())
    ]
    assert knowing == []


def test_the_config_is_read_by_its_types() -> None:
    """`config.trainer.max_steps`, so that a key that is renamed is missed by the type checker."""
    for file in FOLDER.rglob("*.py"):
        if "config" not in file.relative_to(FOLDER).parts:
            assert re.findall(r"""\.tree\[|\btree\[["']""", file.read_text()) == [], file


def test_every_module_has_its_test_file_or_a_line_that_says_what_shows_it() -> None:
    modules = {file.relative_to(FOLDER) for file in FOLDER.rglob("*.py") if file.name != "__init__.py"}
    without = {str(module) for module in modules if not (ROOT / "tests/unit" / module.with_name(f"test_{module.name}")).exists()}
    assert without == set(SHOWN_BY)
    for module, line in SHOWN_BY.items():
        for path in re.findall(r"tests/[\w/]+\.py", line):
            assert (ROOT / path).exists(), f"{module}: {path}"
