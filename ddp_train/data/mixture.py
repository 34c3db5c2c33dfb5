"""Several data sets, each drawn from by a weight (`data=mixture`).

This is what the configuration says; `ddp_train/loader/mixture.py` reads the samples and orders them.
"""

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
        for name, source in sources.items():
            if source is None:
                continue
            if not isinstance(source, Mapping) or set(source) != {"weight", "data"} or source["data"] is None:
                happened = f"has {', '.join(source) or 'nothing'}" if isinstance(source, Mapping) else f"is a {type(source).__name__}"
                expected = "weight and data: {weight: 0.7, data: {_target_: ..., its arguments}}"
                raise ConfigError(key=f"data.sources.{name}", happened=happened, expected=expected)
            self.sources[name], self.weights[name] = source["data"], float(source["weight"])
        if not self.sources:
            fix = "'+data.sources.NAME={weight: 1, data: {_target_: ..., its arguments}}'"
            raise ConfigError(key="data.sources", happened="has no data set", expected="one at least, by name", fix=fix)
