"""The examples of docs/extending.md and docs/howto train: those of extending.md for two steps on one rank.

With the marker `long` all of them, and as they are typed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from ddp_train.config.check import check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.interfaces.run import WriterFacts
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.system.phase import Phases
from ddp_train.training.build.build import build
from ddp_train.training.build.make import make_writers
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.train_state import TrainState
from tests.conftest import Project
from tests.docs.conftest import compose, is_missing_package
from tests.docs.pages import ROOT, Command, commands, write_files
from tests.unit.parts import services

EXTENDING = ROOT / "docs/extending.md"
_MAY_LACK = re.compile(  # what the reader has, an earlier command made, or the network gives
    r"(FILE|(outputs|data)/\w+)\b.*(not exist|is no |not there|cannot be read|cannot be downloaded)|there is no file (outputs|data)/"
)
EXAMPLES = [EXTENDING, *sorted((ROOT / "docs/howto").glob("*.md"))]


def trains(page: Path) -> list[Command]:
    """Return what a page trains at `ddp-train`; other commands are typed with `long` alone."""
    typed = [(command, command.typed_at_ddp_train()) for command in commands(page)]
    return [command for command, words in typed if words is not None and (not words or "=" in words[0] or words[0][0] in "-~")]


HERE = [EXTENDING, *(pytest.param(page, marks=pytest.mark.long) for page in EXAMPLES[1:] if trains(page))]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_what_a_page_trains_trains(page: Path, folder: Path) -> None:
    write_files(page, folder)
    problems = []
    for command in trains(page):
        try:
            _train(_small(*compose(command.typed_at_ddp_train() or [])), folder)
        except UserError as error:
            if not is_missing_package(str(error)) and not _MAY_LACK.search(str(error)):
                problems.append(f"{command}\n{error}")
        except Exception as error:
            problems.append(f"{command}\n{''.join(traceback.format_exception(error))}")
    assert not problems, "\n\n".join(problems)


def _small(config: DictConfig, hydra: DictConfig) -> RunConfig:
    """Make a run of two steps on one rank of a page's configuration."""
    config.cluster.update(launcher="local", device="cpu", nodes=1, processes_per_node=1)
    config.trainer.update(max_steps=2, log_every_steps=1)
    config.loader.num_workers = 0
    if config.scheduler.get("warmup_steps"):
        config.scheduler.warmup_steps = 0
    if str(config.data.get("_target_", "")).endswith("SyntheticImages"):
        config.data.num_samples, config.data.eval.num_samples = 128, 40
    return check_config(config, hydra=hydra)


def _train(config: RunConfig, folder: Path) -> None:
    parts = build(config, alone())
    own = {name: node for name, node in config.metrics.items() if node and not node["_target_"].startswith("ddp_train.")}
    total_steps = parts.total_steps
    facts = WriterFacts(run_dir=str(folder), config=config.tree, hyper_parameters={}, step=0, total_steps=total_steps, phases=Phases())
    writers = make_writers(own, facts)

    def write(record: dict[str, Any]) -> None:
        for writer in writers:
            writer.write(record)

    trainer = build_trainer(config, parts, TrainState(), alone(), services(RunFolder(folder), write=write))
    assert trainer.train()
    trainer.end(Status.COMPLETED)
    for writer in writers:
        writer.close()


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_a_page_can_be_typed_from_top_to_bottom(page: Path, project: Project) -> None:
    write_files(page, project.folder)
    done: list[Path] = []
    lacks = False
    for command in commands(page):
        words = command.typed_at_ddp_train()
        if words is None:
            _run_script(command, project)
            continue
        if lacks and words[:1] == ["-m"]:
            continue  # jobs of a sweep would say so in their logs
        words = [word.replace("RUN", str(done[-1].relative_to(project.folder))) if re.search(r"\bRUN\b", word) else word for word in words]
        finished = project.run(*words, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=900)
        lacks = finished.returncode == 2 and bool(is_missing_package(finished.output) or _MAY_LACK.search(finished.output))
        if lacks:
            continue
        assert finished.returncode == 0, f"{command}\n{finished.output}"
        made = set(project.runs()) - set(done)
        done += sorted((folder for folder in made if "evaluations" not in folder.parts), key=os.path.getmtime)


def _run_script(command: Command, project: Project) -> None:
    """Run a file of the page; one that needs a package that is not here is left out, and so is every other program."""
    names = [word for word in command.words if word.endswith(".py") and (project.folder / word).exists()]
    if not names or command.words[0] not in ("python", "torchrun"):
        return
    start = ["-m", "torch.distributed.run"] if command.words[0] == "torchrun" else []
    done = subprocess.run([sys.executable, *start, *command.words[1:]], cwd=project.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "ModuleNotFoundError" in done.stderr, f"{command}\n{done.stdout}{done.stderr}"
