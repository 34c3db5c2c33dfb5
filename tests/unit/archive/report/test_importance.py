from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.archive.report import importance

VALUES = [{"lr": 10.0**-n, "model": "mlp" if n % 2 else "convnet", "seed": 0} for n in range(6)]


def test_without_a_new_optuna_the_page_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.10.1", "3.5.0"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert "needs Optuna 3.6" in importance.importance_of(VALUES, [1.0] * 6, goal="max")["why"]


def test_few_runs_or_equal_ones_have_no_importance() -> None:
    assert "needs 4 runs" in importance.importance_of(VALUES[:3], [1.0] * 3, goal="max")["why"]
    assert "needs 4 runs" in importance.importance_of([{"lr": 1}] * 6, [1.0] * 6, goal="max")["why"]
    assert "needs 4 runs" in importance.importance_of(VALUES, [None] * 6, goal="max")["why"]
    assert "needs 4 runs" in importance.importance_of([{"betas": [0.9, 0.95]}, {"betas": [0.9, 0.9]}], [1.0, 2.0], goal="max")["why"]


def test_shares_come_from_optuna_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the interface of Optuna 3.6, which cannot be installed beside Hydra's sweeper."""
    trials: list[dict[str, Any]] = []
    study = SimpleNamespace(add_trial=trials.append)
    float_distribution = type("Float", (), {"__init__": lambda self, low, high, log: None})
    optuna = SimpleNamespace(
        logging=SimpleNamespace(set_verbosity=lambda level: None, ERROR=40),
        create_study=lambda direction: study,
        distributions=SimpleNamespace(FloatDistribution=float_distribution, CategoricalDistribution=tuple),
        trial=SimpleNamespace(create_trial=lambda **trial: trial),
        importance=SimpleNamespace(
            get_param_importances=lambda study, evaluator: {"model": 0.25, "lr": 0.75}, PedAnovaImportanceEvaluator=lambda: None
        ),
    )
    monkeypatch.setattr(metadata, "version", lambda name: "4.5.0")
    modules = {"optuna": optuna, "optuna.importance": optuna.importance}
    monkeypatch.setattr(importance.importlib, "import_module", modules.__getitem__)
    found = importance.importance_of(VALUES, [0.1, 0.2, 0.3, 0.4, 0.5, None], goal="max")
    assert found == {"shares": [["lr", 0.75], ["model", 0.25]]}
    assert [trial["params"]["model"] for trial in trials] == ["convnet", "mlp", "convnet", "mlp", "convnet"]
