"""Train only a part of a model, for the whole run or until a step."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Run, matching, named_parameters


class Freeze:
    """Keeps parameters as they are, and lets them be trained from a step on. They take no backward, no gradient and no optimizer's step.

    Batch norms in a frozen part still average what they see. A rate that follows a schedule is at that step where the schedule is.

    Args:
        patterns: names of parameters or of modules that hold them, with `*` for any text: `[backbone]`, `[layers.0, '*.bias']`.
        until_step: steps taken before they are trained; None: they never are.
    """

    def __init__(self, patterns: Sequence[str], *, until_step: int | None = None) -> None:
        if isinstance(patterns, str) or not patterns:
            raise ConfigError(key="callbacks.freeze.patterns", happened=f"is {patterns!r}", expected="a list of names, as [backbone]")
        self._patterns, self._until_step = list(patterns), until_step

    def start(self, run: Run) -> None:
        """Freeze them, unless the run is past that step already; also where it has gone back before it."""
        parameters = named_parameters(run.model)
        names = matching(parameters, self._patterns, key="callbacks.freeze.patterns")
        is_trained = self._until_step is not None and run.step >= self._until_step
        run.set_trained(names, is_trained)
        if run.rank == 0 and not is_trained:
            until = "" if self._until_step is None else f" until step {self._until_step}"
            print(f"frozen   {sum(parameters[name].numel() for name in names):,} parameters in {len(names)} tensors{until}", flush=True)

    def step(self, run: Run) -> None:
        """Let them be trained when it is time."""
        if run.step == self._until_step:
            run.set_trained(matching(named_parameters(run.model), self._patterns, key="callbacks.freeze.patterns"), True)
            if run.rank == 0:
                print(f"all parameters that were frozen are trained after step {run.step}", flush=True)
