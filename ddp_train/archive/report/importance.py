"""Which of the keys that runs differ in their metric depends on: Optuna's PED-ANOVA, where a version is installed that has it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

_LEAST_RUNS = 4
_MISSING = "importance of keys needs Optuna 3.6 or newer (pip install optuna), which has PED-ANOVA"


def importance_of(values: Sequence[Mapping[str, Any]], metric: Sequence[float | None], *, goal: str) -> dict[str, Any]:
    """Return the share of each key in how good a run is, the largest first, or why there is none.

    Args:
        values: of each run, the values of the keys.
        metric: of each run; None: it has none, and does not count.

    Source: Watanabe et al. 2023, arXiv:2304.10255 (PED-ANOVA).
    """
    plain = [{key: value if isinstance(value, (int, float)) else str(value) for key, value in row.items()} for row in values]
    rows = [(row, number) for row, number in zip(plain, metric, strict=True) if number is not None]
    spread = {key: {row.get(key) for row, _ in rows} for key in (rows[0][0] if rows else {})}
    keys = [key for key, found in spread.items() if len(found) > 1]
    if len(rows) < _LEAST_RUNS or not keys:
        return {"why": f"importance of keys needs {_LEAST_RUNS} runs with the metric that differ in some key"}
    try:
        is_there = tuple(int(number) for number in re.findall(r"\d+", metadata.version("optuna"))[:2]) >= (3, 6)
    except metadata.PackageNotFoundError:
        is_there = False
    if not is_there:  # without an import, which takes a second
        return {"why": _MISSING}
    optuna: Any = importlib.import_module("optuna")
    evaluator = importlib.import_module("optuna.importance").PedAnovaImportanceEvaluator()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {key: _distribution(optuna, spread[key]) for key in keys}
    study = optuna.create_study(direction="maximize" if goal == "max" else "minimize")
    for row, number in rows:
        chosen = {
            key: row[key] if isinstance(distributions[key], optuna.distributions.FloatDistribution) else str(row[key]) for key in keys
        }
        study.add_trial(optuna.trial.create_trial(params=chosen, distributions=distributions, value=number))
    try:
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError) as error:
        return {"why": f"Optuna finds no importance of keys: {error}"}
    return {"shares": sorted(([key, round(float(share), 4)] for key, share in shares.items()), key=lambda pair: -pair[1])}


def _distribution(optuna: Any, found: set[Any]) -> Any:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in found):
        low, high = min(found), max(found)
        return optuna.distributions.FloatDistribution(low, high, log=low > 0 and high / low >= 10)
    return optuna.distributions.CategoricalDistribution(sorted(map(str, found)))
