"""Several data sets, each drawn from by a weight (`data=mixture`).

This is what the configuration says, and no more: how their samples are read and in which order they come is the loader's
(`ddp_train/loader/mixture.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_train.errors import ConfigError


class Mixture:
    """Data sets by name, whose samples come as often as their weights say.

    Args:
        sources: name -> {"weight": a number above 0, "data": any data set with positions}; None in the place of both leaves one out.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.sources: dict[str, Any] = {}
        self.weights: dict[str, float] = {}
        for name, each in sources.items():
            if each is None:
                continue
            if not isinstance(each, Mapping) or set(each) != {"weight", "data"} or each["data"] is None:
                happened = f"has {', '.join(each) or 'nothing'}" if isinstance(each, Mapping) else f"is a {type(each).__name__}"
                expected = "weight and data: {weight: 0.7, data: {_target_: ..., its arguments}}"
                raise ConfigError(key=f"data.sources.{name}", happened=happened, expected=expected)
            self.sources[name], self.weights[name] = each["data"], float(each["weight"])
        if not self.sources:
            fix = "'+data.sources.NAME={weight: 1, data: {_target_: ..., its arguments}}'"
            raise ConfigError(key="data.sources", happened="has no data set", expected="one at least, by name", fix=fix)
