"""Train only a part of a model, for the whole run, until a step or from a step on."""

from collections.abc import Sequence
from typing import ClassVar

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Callback, Run
from ddp_train.interfaces.parameters import matching, named_parameters


class Freeze(Callback):
    """Keeps parameters as they are from a step on, until another one. They have no backward, no gradient and no optimizer step.

    Batch norms in a frozen part still update their averages. The learning-rate schedule goes on meanwhile.

    Args:
        patterns: names of parameters or of modules that hold them, with `*` for any text: `[backbone]`, `[layers.0, '*.bias']`.
        until_step: steps taken before they are trained again; None: they never are.
        from_step: steps taken before they are frozen.
    """

    argument_ranges: ClassVar = {"from_step": {"min": 0}}

    def __init__(self, patterns: Sequence[str], *, until_step: int | None = None, from_step: int = 0) -> None:
        if isinstance(patterns, str) or not patterns:
            raise ConfigError(key=".patterns", happened=f"is {patterns!r}", expected="a list of names, as [backbone]")
        if until_step is not None and from_step >= until_step > 0:
            raise ConfigError(key=".from_step", happened=f"is {from_step}", expected=f"less than until_step={until_step}")
        self._patterns, self._until_step, self._from_step = list(patterns), until_step, from_step

    def on_start(self, run: Run) -> None:
        is_over = self._until_step is not None and run.step >= self._until_step
        is_frozen = run.step >= self._from_step and not is_over
        names = self._set_trained(run, not is_frozen)
        if run.rank == 0 and not is_over:
            number = sum(parameter.numel() for name, parameter in named_parameters(run.model).items() if name in names)
            begin = "" if is_frozen else f" from step {self._from_step} on"
            until = "" if self._until_step is None else f" until step {self._until_step}"
            print(f"frozen   {number:,} parameters in {len(names)} tensors{begin}{until}", flush=True)

    def on_step(self, run: Run) -> None:
        if run.step not in (self._from_step, self._until_step):
            return
        is_trained = run.step == self._until_step
        self._set_trained(run, is_trained)
        if run.rank == 0:
            print(f"{'all frozen parameters are trained' if is_trained else 'frozen'} after step {run.step}", flush=True)

    def _set_trained(self, run: Run, is_trained: bool) -> set[str]:
        names = matching(named_parameters(run.model), self._patterns, key=".patterns")
        run.set_trained(names, is_trained)
        return names
