"""Faults on purpose happen once, where and when they are asked for, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ddp_train.config.schema import Fault
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.rank.fault_injection import ON_ITSELF, InjectedFault, damage, inject
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.phase import Phase, Phases
from tests.unit.parts import checked, components


def injected(tmp_path: Path, **fault: Any) -> tuple[Phases, torch.nn.Module]:
    """Return the `Phases` of a run of one rank with one fault, and the model."""
    text = ",".join(f"{name}:{value}" for name, value in fault.items())
    parts, phases = components(), Phases()
    inject(checked("debug=faults", f"debug.faults=[{{{text}}}]").debug.faults, phases, parts, alone(), RunFolder(tmp_path))
    return phases, parts.model


def test_the_schema_knows_what_the_injector_does() -> None:
    assert set(ON_ITSELF) <= set(get_args(Fault))


def test_a_fault_happens_once_in_its_phase_after_its_step(tmp_path: Path) -> None:
    phases, _ = injected(tmp_path, kind="exception", phase="save", step=4)
    for phase, step in ((Phase.STEP, 4), (Phase.SAVE, 2), (Phase.DATA, 4)):
        phases.enter(phase, step)
    with pytest.raises(InjectedFault):
        phases.enter(Phase.SAVE, 4)
    phases.enter(Phase.SAVE, 4)


@pytest.mark.parametrize(("attempt", "happens"), [(0, False), (1, True), ("every", True)])
def test_a_rank_that_is_started_again_does_not_die_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempt: int | str, happens: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    phases, _ = injected(tmp_path, kind="exception", attempt=attempt)
    if happens:
        with pytest.raises(InjectedFault):
            phases.enter(Phase.STEP, 0)
    else:
        phases.enter(Phase.STEP, 0)


@pytest.mark.parametrize(("kind", "factor"), [("nan", float("nan")), ("spike", 100.0)])
def test_a_bad_number_is_of_one_step(tmp_path: Path, kind: str, factor: float) -> None:
    phases, model = injected(tmp_path, kind=kind, step=1)
    images = torch.randn(2, 3, 16, 16)
    phases.enter(Phase.STEP, 0)
    before = model(images)
    phases.enter(Phase.STEP, 1)
    torch.testing.assert_close(model(images), before * factor, equal_nan=True)
    for phase in (Phase.DATA, Phase.STEP):  # the step's next micro-batch
        phases.enter(phase, 1)
    torch.testing.assert_close(model(images), before * factor, equal_nan=True)
    for phase in (Phase.START, Phase.DATA, Phase.STEP):  # the same step again, as after a rewind
        phases.enter(phase, 1)
    torch.testing.assert_close(model(images), before)


def test_a_drift_is_of_one_weight(tmp_path: Path) -> None:
    phases, model = injected(tmp_path, kind="drift")
    before = {name: value.clone() for name, value in model.named_parameters()}
    phases.enter(Phase.STEP, 0)
    changes = torch.cat([(value - before[name]).flatten() for name, value in model.named_parameters()])
    assert changes.nonzero().numel() == 1
    torch.testing.assert_close(changes.sum().item(), 0.5)


@pytest.mark.parametrize("kind", ["truncate", "bit_flip", "missing_file"])
def test_damage_is_done_to_the_largest_file_of_the_newest_checkpoint(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match="no checkpoint yet"):
        damage(tmp_path, kind)
    for step in (2, 4):
        (tmp_path / f"step_{step:08d}").mkdir()
        for name, size in (("weights", 1000), ("manifest.json", 10)):
            (tmp_path / f"step_{step:08d}" / name).write_bytes(bytes(size))
    file = damage(tmp_path, kind)
    assert file == tmp_path / "step_00000004" / "weights"
    found = file.read_bytes() if file.exists() else None
    assert found == {"truncate": bytes(500), "bit_flip": bytes(500) + b"\x01" + bytes(499), "missing_file": None}[kind]
