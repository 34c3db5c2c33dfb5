"""Where a run or a sweep goes: by its words, and by what lies there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ddp_train import CONF
from ddp_train.cli.compose import check_composed
from ddp_train.cli.location import Location, location_of, location_of_sweep, require_pipeline, typed_run_folder
from ddp_train.errors import ENVIRONMENT_REFUSES, ConfigError, ConfigErrors, EnvironmentRefuses, UserError
from ddp_train.run_folder.claim import give_up_claims
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep, SweepJob
from ddp_train.run_folder.verdict import mark_cancelled
from tests.unit.parts import checked, components, saved

SLURM = ["cluster=slurm", "cluster.device=cpu"]


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
    give_up_claims()


def test_a_folder_that_nobody_typed_is_new_and_gets_another_name_where_it_exists(here: Path) -> None:
    found = location("hydra.run.dir=typed")
    assert found == Location(folder=here / "typed", key="hydra.run.dir", is_new=False, is_continued=False)
    new = Location(folder=here / "new", key="hydra.run.dir", is_new=True, is_continued=False)
    assert [new.claim_for_sweep().name, new.claim_for_sweep().name] == ["new", "new_1"]
    assert location().is_new


def test_a_typed_folder_with_a_run_goes_on_and_only_under_its_own_configuration(here: Path) -> None:
    composed = composed_of("hydra.run.dir=typed", "seed=3")
    checked = check_composed(composed, composed.hydra)
    (here / "typed").mkdir()
    (here / "typed/config.yaml").write_text(checked.yaml())
    found = location("hydra.run.dir=typed", "seed=3")
    assert found.is_continued and found.claim_for_run(checked) == here / "typed"
    give_up_claims()  # as at the end of the command
    with pytest.raises(ConfigError, match="has a different configuration"):
        found.require_same(check_composed(other := composed_of("seed=4"), other.hydra))
    assert not location("hydra.run.dir=typed", "resume=never").is_continued
    with pytest.raises(UserError, match=r"hydra\.run\.dir"):
        location("hydra.run.dir=typed", "resume=never").claim_for_run(checked)


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
        location("hydra.run.dir=sweep/0").claim_for_run(checked)
    os.close(descriptor)
    assert location("hydra.run.dir=sweep/0").claim_for_run(checked) == here / "sweep/0"


def test_no_value_of_a_pattern_leads_out_of_the_folder_before_it() -> None:
    with pytest.raises(ConfigErrors, match=r"hydra\.sweep\.dir: .* leads to"):
        location_of_sweep(composed_of("name=../../out"))
    assert location_of_sweep(composed_of("name=in")).is_new


def test_machines_compare_the_run_folder_that_was_typed_and_no_other(here: Path) -> None:
    assert typed_run_folder(composed_of()) == ""
    assert typed_run_folder(composed_of("hydra.run.dir=a", "hydra.run.dir=b")) == str(here / "b")
    assert typed_run_folder(composed_of("hydra.run.dir=a/${seed}")) == "a/${seed}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of a run that has saved nothing, where the user stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("name: a\n")
    return Path("a")


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        require_pipeline(checked(*SLURM, *overrides))
    return str(caught.value)


def test_one_run_or_several_are_waited_for_wherever_one_stands_then(run: Path) -> None:
    assert checked("after=a").runs_before() == [run.absolute()]
    assert checked("after=[a,b/c]").runs_before() == [run.absolute(), Path("b/c").absolute()]
    assert checked().runs_before() == []
    require_pipeline(checked(*SLURM, "after=a"))


@pytest.mark.parametrize("preset", ["local", "cpu", "machines", "ssh"])
def test_outside_slurm_the_shell_waits_and_after_is_refused(run: Path, preset: str) -> None:
    words = {"machines": ["cluster.nodes=2", "cluster.rendezvous_endpoint=a:1"], "ssh": ["cluster.hosts=[a,b]", "cluster.device=cpu"]}
    config = checked(f"cluster={preset}", *words.get(preset, []), "after=a")
    with pytest.raises(ConfigError, match=r"after: .* waits for no other run(.|\n)*`ddp-train \.\.\. && ddp-train \.\.\.`"):
        require_pipeline(config)


def test_ranks_that_torchrun_has_started_wait_for_no_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_train.cli.location.is_torchrun_worker", lambda: True)
    with pytest.raises(ConfigError, match="after: torchrun starts this run at once"):
        require_pipeline(checked(*SLURM, "after=a"))


@pytest.mark.parametrize("value", ["[]", "3", "[a,3]", "{a:b}", "true"])
def test_what_is_no_path_is_refused(value: str) -> None:
    with pytest.raises(ConfigErrors, match=r"after: is .*\n.*a run folder, or several"):
        checked(f"after={value}")


def test_what_is_no_run_is_named(run: Path) -> None:
    assert "/typo is not a run folder" in refused("after=[a,typo]")
    Sweep(root=run.absolute() / "sweep", command=[]).save()
    said = refused("after=a/sweep")
    assert "/a/sweep is not a run folder" in said and "of a sweep those of its jobs" in said


def test_data_without_labels_is_refused_where_the_objective_needs_some() -> None:
    without = ["data=image_folder", "data.labelled=false"]
    with pytest.raises(ConfigErrors, match=r"data\.labelled: is false"):
        require_pipeline(checked(base=without))
    require_pipeline(checked("objective=custom", "objective._target_=tests.unit.cli.test_location.Own", base=without))


class Own:
    """An objective that may do without."""


def test_a_run_that_never_gets_done_is_not_waited_for(run: Path) -> None:
    mark_cancelled(RunFolder(run))
    with pytest.raises(EnvironmentRefuses, match="a will not finish: cancelled") as caught:
        require_pipeline(checked(*SLURM, "after=a"))
    assert caught.value.exit_code == ENVIRONMENT_REFUSES


@pytest.mark.parametrize("given", ["a", "a/checkpoints/best", "a/checkpoints/last"])
def test_weights_of_a_run_that_has_saved_none_need_one_that_is_waited_for(run: Path, given: str) -> None:
    said = refused(f"init_from={given}")
    assert "init_from: a has no complete checkpoint yet" in said and "fix: after=a" in said
    require_pipeline(checked(*SLURM, f"init_from={given}", "after=a"))
    require_pipeline(checked(*SLURM, f"init_from={given}", "after=[a]"))
    with pytest.raises(ConfigErrors, match="fix: `ddp-train"):
        require_pipeline(checked(f"init_from={given}"))
    saved(run / "checkpoints", 3, components())
    require_pipeline(checked(f"init_from={given}"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("theirs.pt", b"no archive " * 9, "is not in the format of torch 1.6"),
        ("theirs.ckpt", b"no archive " * 9, "is not in the format of torch 1.6"),
        ("theirs.safetensors", b"no header " * 9, "its header would have"),
        ("theirs.safetensors", b"\x02" + bytes(7) + b"{", "its header would have 2 bytes, in a file of 9"),
        ("theirs.onnx", b"", "is not a file type that can be read safely"),
        ("theirs", None, "there is no such file or folder"),
        ("theirs.pt", None, "No such file or directory"),
    ],
)
def test_a_file_that_holds_no_weights_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(ConfigErrors) as caught:
        require_pipeline(checked(f"init_from={name}"))
    assert f"init_from: {name}: {said}" in str(caught.value)


def test_weights_in_a_known_form_are_left_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": 5, "model_state_dict": {"a": torch.ones(2)}, "loss": 0.4}, "theirs.pt")
    safetensors.torch.save_file({"a": torch.ones(2)}, "theirs.safetensors")
    for name in ("theirs.pt", "theirs.safetensors"):
        require_pipeline(checked(f"init_from={name}"))


def test_a_file_that_another_machine_or_run_may_have_is_left_to_the_ranks(run: Path) -> None:
    require_pipeline(checked(*SLURM, "init_from=there.safetensors"))
    require_pipeline(checked(*SLURM, "after=a", "init_from=later.safetensors"))
    require_pipeline(checked("init_from=gone.safetensors"), begins=False)
