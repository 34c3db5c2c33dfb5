"""What a `_target_` names, and what it takes."""

from __future__ import annotations

from ddp_train.config.target import check_target


def test_code_from_a_hub_is_refused() -> None:
    (problem,) = check_target({"_target_": "torch.nn.Linear", "_partial_": True, "trust_remote_code": True}, "model")
    assert problem.key == "model.trust_remote_code"


def test_a_class_without_a_readable_signature_is_left_to_itself() -> None:
    assert check_target({"_target_": "builtins.dict", "anything": 1}, "model") == []
