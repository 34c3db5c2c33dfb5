"""What the doctor is asked with. What it finds: tests/unit/launch/doctor; on machines: tests/cluster/test_doctor.py."""

from __future__ import annotations

import sys

import pytest

from ddp_train.cli import doctor
from ddp_train.cli.compose import EXAMINES
from ddp_train.errors import ConfigError
from ddp_train.launch.launcher import Launcher

UNUSED = Launcher(run=lambda job: 1, slots=lambda folder, count: [])


@pytest.mark.parametrize("word", ["-m", "--multirun", "resume=outputs/x"])
def test_it_is_of_one_run_that_is_to_come(word: str) -> None:
    with pytest.raises(ConfigError, match="the machines of one run that is to come"):
        doctor.examine([word], UNUSED)


@pytest.mark.parametrize(("words", "kind"), [(["cluster=cpu"], "quick"), (["--full", "cluster=cpu"], "full")])
def test_it_composes_what_the_run_would_be_given(words: list[str], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", "doctor", *words])
    monkeypatch.setattr(doctor, "compose", lambda launcher: 7)
    assert doctor.examine(words, UNUSED) == 7
    assert sys.argv[1:] == ["cluster=cpu", "resume=never", f"++{EXAMINES}={kind}"]
