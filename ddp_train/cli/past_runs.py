"""What earlier runs say of one that is planned: how long a step takes."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import saved_config
from ddp_train.errors import ConfigError
from ddp_train.system.files import tail

_LOOKED_AT = 20  # of the newest runs: each costs the reading of a YAML
_RECORDS = 20  # of the newest ones of training, of which the median counts
_TAIL_BYTES = 1 << 16
_ALIKE = ("model", "data", "amp")


@dataclass(frozen=True, kw_only=True)
class Past:
    """The step time of an earlier run."""

    folder: Path
    step_ms: float
    batch: str  # its identity, in words; "" where it is not known


def newest_like(config: RunConfig, runs: Path) -> Past | None:
    """Return the newest run with the same model, data and precision; None where there is none.

    Args:
        runs: the folder that holds runs, and `sweeps`.
    """
    files = [*runs.glob("*/metrics.jsonl"), *runs.glob("sweeps/*/*/metrics.jsonl")]
    with suppress(OSError):  # one that is just removed
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[:_LOOKED_AT]:
        with suppress(ConfigError):  # of another version, say
            saved = saved_config(file.parent)
            if all(saved.get(name) == getattr(config, name) for name in _ALIKE) and (times := _step_times(file)):
                return Past(folder=file.parent, step_ms=statistics.median(times), batch=_batch(file.parent))
    return None


def _step_times(metrics: Path) -> list[float]:
    found = []
    for line in tail(metrics, _TAIL_BYTES).splitlines():
        with suppress(ValueError, AttributeError):  # the first may be cut
            record = json.loads(line)
            if record.get("split") == "train" and isinstance(record.get("step_ms"), (int, float)):
                found.append(float(record["step_ms"]))
    return found[-_RECORDS:]


def _batch(run: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((run / "environment.json").read_text())["batch"])
    return ""
