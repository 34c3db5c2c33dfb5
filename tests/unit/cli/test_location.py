"""Where a run or a sweep goes: by its words, and by what lies there."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ddp_train import CONF
from ddp_train.cli.compose import check_composed
from ddp_train.cli.location import Location, location_of, location_of_sweep, typed_run_folder
from ddp_train.errors import ConfigError, ConfigErrors, UserError
from ddp_train.run_folder.claim import release
from ddp_train.run_folder.sweep import Sweep, SweepJob


def composed_of(*words: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=["model=mlp", "cluster=cpu", *words], return_hydra_config=True)


def location(*words: str) -> Location:
    composed = composed_of(*words)
    return location_of(composed, check_composed(composed, composed.hydra))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    release()


def test_a_folder_that_nobody_typed_is_new_and_gets_another_name_where_it_exists(here: Path) -> None:
    found = location("hydra.run.dir=typed")
    assert found == Location(folder=here / "typed", key="hydra.run.dir", is_new=False, is_continued=False)
    new = Location(folder=here / "new", key="hydra.run.dir", is_new=True, is_continued=False)
    assert [new.take_for_sweep().name, new.take_for_sweep().name] == ["new", "new_1"]
    assert location().is_new


def test_a_typed_folder_with_a_run_goes_on_and_only_under_its_own_configuration(here: Path) -> None:
    composed = composed_of("hydra.run.dir=typed", "seed=3")
    checked = check_composed(composed, composed.hydra)
    (here / "typed").mkdir()
    (here / "typed/config.yaml").write_text(checked.yaml())
    found = location("hydra.run.dir=typed", "seed=3")
    assert found.is_continued and found.take_for_run(checked) == here / "typed"
    release()  # as at the end of the command
    with pytest.raises(ConfigError, match="has a different configuration"):
        found.require_same(check_composed(other := composed_of("seed=4"), other.hydra))
    assert not location("hydra.run.dir=typed", "resume=never").is_continued
    with pytest.raises(UserError, match=r"hydra\.run\.dir"):
        location("hydra.run.dir=typed", "resume=never").take_for_run(checked)


def test_a_job_of_a_sweep_goes_on_when_the_sweep_works_no_more(here: Path) -> None:
    sweep = Sweep(root=here / "sweep", command=[], jobs=[SweepJob(number=0, folder="0", overrides=[], identity="")])
    composed = composed_of("hydra.run.dir=sweep/0")
    checked = check_composed(composed, composed.hydra)
    (here / "sweep/0").mkdir(parents=True)
    (here / "sweep/0/config.yaml").write_text(checked.yaml())
    sweep.save()
    descriptor = os.open(here / "sweep", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another run is working in"):
        location("hydra.run.dir=sweep/0").take_for_run(checked)
    os.close(descriptor)
    assert location("hydra.run.dir=sweep/0").take_for_run(checked) == here / "sweep/0"


def test_no_value_of_a_pattern_leads_out_of_the_folder_before_it() -> None:
    with pytest.raises(ConfigErrors, match=r"hydra\.sweep\.dir: .* leads to"):
        location_of_sweep(composed_of("name=../../out"))
    assert location_of_sweep(composed_of("name=in")).is_new


def test_machines_compare_the_run_folder_that_was_typed_and_no_other(here: Path) -> None:
    assert typed_run_folder(composed_of()) == ""
    assert typed_run_folder(composed_of("hydra.run.dir=a", "hydra.run.dir=b")) == str(here / "b")
    assert typed_run_folder(composed_of("hydra.run.dir=a/${seed}")) == "a/${seed}"
