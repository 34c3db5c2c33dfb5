"""What an agent tells its ranks."""

from __future__ import annotations

import pytest

from ddp_train.system import torchrun_env


def test_a_rank_alone_in_the_environment_makes_no_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*torchrun_env.VARIABLES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")  # as a Kubernetes operator sets it for a whole pod
    assert not torchrun_env.is_torchrun_worker()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert torchrun_env.is_torchrun_worker()


def test_an_agent_that_says_nothing_of_restarts_has_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert torchrun_env.is_last_attempt()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert not torchrun_env.is_last_attempt()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert torchrun_env.is_last_attempt()


@pytest.mark.parametrize(
    ("agent", "environment", "hangs"),
    [
        ("torchrun --nnodes=1:4 -m ddp_train", {}, True),
        ("torchrun --nnodes 2:3 -m ddp_train", {}, True),
        ("torchrun -m ddp_train", {"PET_NNODES": "1:2"}, True),
        ("torchrun --nnodes=1:4 -m ddp_train", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ("torchrun --nnodes=2 -m ddp_train", {}, False),
        ("torchrun --nnodes=2:2 -m ddp_train", {}, False),
        ("torchrun --standalone -m ddp_train", {"PET_NNODES": "2"}, False),
    ],
)
def test_torch_waits_for_ever_for_a_machine_that_joins_a_range_without_the_variable(
    agent: str, environment: dict[str, str], hangs: bool
) -> None:
    assert torchrun_env.joining_hangs(agent, environment) == hangs
