"""What an objective must offer, and what computes its loss.

Components take plain keyword arguments and know nothing of Hydra. Of ranks only the strategy and the loss scaler are told. What has no
protocol here is torch's own: a model is an `nn.Module`, an optimizer is torch's. A loss function is adapted by objective/supervised.py.
Shapes: B samples, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_train.interfaces.batch import Batch
from ddp_train.traits import Goal


class Scored(NamedTuple):
    """What evaluation gets from one forward of a batch. A plain tuple will do, too."""

    sums: dict[str, Tensor]  # what `score` returns
    rows: Mapping[str, Tensor] = {}  # one for each sample: name -> [B, ...], alike in every batch
    compared: tuple[Any, Any] | None = None  # for `evaluation.metrics`: predictions as torchmetrics takes them (probabilities), targets


class BaseObjective(Protocol):
    """All of an objective but its loss: its metrics and its unit. Its class may declare `ObjectiveConstants`."""

    goals: Mapping[str, Goal]
    """The metrics that `metrics` returns, the headline one first, and which way is better."""

    def weight(self, batch: Batch) -> int | Tensor:
        """Count the units (samples, tokens) that the batch's loss sums over.

        An int when the shapes alone tell, the same for every sample; else a tensor of shape [], which costs one small all-reduce a step.
        """

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return a batch's totals, which evaluation adds up: floats for sums, int64 for counts; of shape [], or [K] for one per class."""

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Turn the sums over the whole evaluation set into metrics: numbers, and lists of them for what has shape [K]."""


class Objective(BaseObjective, Protocol):
    """Defines the loss that training minimises, and the metrics of evaluation.

    One that is an `nn.Module` may have parameters (a temperature, centres) and buffers: they are trained, shared and saved as the model's.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the batch's units, shape [], with gradient.

        `model` is the user's own on any number of ranks: it may be called several times, and so may methods of it.

        The sum, not the mean: the loop divides it by the units of the whole global batch, over all ranks and micro-batches.
        """


@runtime_checkable
class TurnObjective(BaseObjective, Protocol):
    """An objective whose parts take turns within a step, each with a loss and parameters of its own: a GAN, actor and critic.

    One optimizer step of each turn makes a step of the run. All turns of a step get the same micro-batches, and `weight` holds for each.
    """

    turns: Mapping[str, Sequence[str]]
    """Name of a turn -> the parameters that it trains, as `matching` takes them, in their order; each parameter is in one at least."""

    def loss(self, model: nn.Module, batch: Batch, turn: str) -> Tensor:
        """Return one turn's loss, shape [], with gradient: the sum over the batch's units. Unlike `Objective.loss` it takes a turn's name.

        Any part of the model may be called.
        """


AnyObjective = Objective | TurnObjective
"""One that has a loss, or one for each turn."""


@runtime_checkable
class SupportsTurnsAt(Protocol):
    """An objective whose parts take turns, but not each in every step."""

    def turns_at(self, step: int) -> Sequence[str]:
        """Return the turns of the step that comes after `step` steps, one at least, in their order, the same on every rank."""


@runtime_checkable
class HasUnit(Protocol):
    """An objective that names the unit that its `weight` counts."""

    unit: str
    """token, next_token (tokens that another one comes before), sample or another word."""


@runtime_checkable
class SupportsPredict(Protocol):
    """An objective that also returns its predictions for each sample of an evaluation: for `evaluation.save_predictions=true`."""

    def predict(self, model: nn.Module, batch: Batch) -> Scored:
        """Return sums and rows. Each name is that of a file NAME.npy with one row for each evaluation sample, in the data set's order."""


@runtime_checkable
class SupportsCompare(Protocol):
    """An objective that also returns predictions with their targets: for `evaluation.metrics`."""

    def compare(self, model: nn.Module, batch: Batch) -> Scored:
        """Return sums, the rows of `predict` ({} without), and predictions, one row for each sample, with targets, which have a length."""


@runtime_checkable
class SupportsInfer(Protocol):
    """An objective that also returns predictions for samples without targets: for `ddp-train predict`."""

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
        """Return one row per sample: name -> [B, ...], alike in every batch; inputs are a batch without targets: a tuple or a dict."""


@runtime_checkable
class BorrowsWeights(Protocol):
    """An objective that begins with weights of others: a teacher. It is an `nn.Module`."""

    borrows: Mapping[str, str]
    """Name of a part of the objective -> its weights, as `init_from` takes them."""


@runtime_checkable
class SupportsBindModel(Protocol):
    """An objective that has to know the model before the first batch."""

    def bind_model(self, model: nn.Module) -> None:
        """Look at the model, before anything wraps it.

        It has values, which may be copied; a class that reads none may say `binds_without_values = True`, and spares a rank making them.
        """


class LossModule(nn.Module):
    """Computes the loss of a batch in its forward, which is what a strategy wraps.

    So the objective has the model itself, on two ranks as on one: it may call the model several times, call methods of it, and read its
    attributes. A strategy that wrapped the model alone would see none but calls of its forward, and would hide all else.

    Args:
        objective: an `nn.Module`, too, where it has weights.
        has_state: the objective's weights and buffers are trained, shared and saved with the model's.
        turn: whose loss; None: the objective takes no turns.
    """

    objective: AnyObjective

    def __init__(self, model: nn.Module, objective: AnyObjective, *, has_state: bool = True, turn: str | None = None) -> None:
        super().__init__()
        self.model = model
        if has_state:
            self.objective = objective
        else:
            self.__dict__["objective"] = objective  # which `nn.Module` does not see: DDP would send a teacher's buffers in each step
        self.turn = turn

    def forward(self, batch: Batch) -> Tensor:
        return loss_of_turn(self.objective, self.model, batch, self.turn)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; that of the objective's parts is its own (a teacher that only evaluates)."""
        self.training = mode
        self.model.train(mode)
        return self


def loss_of_turn(objective: AnyObjective, model: nn.Module, batch: Batch, turn: str | None) -> Tensor:
    """Return the training loss of a batch, shape []: of one turn, or (None) of an objective that takes none. Asked in every step."""
    if turn is None:
        return cast(Objective, objective).loss(model, batch)
    return cast(TurnObjective, objective).loss(model, batch, turn)


def whole_loss(objective: AnyObjective, model: nn.Module, batch: Batch) -> Tensor:
    """Return the training loss of a batch, shape []; of turns their sum."""
    if not isinstance(objective, TurnObjective):
        return objective.loss(model, batch)
    return torch.stack([objective.loss(model, batch, turn) for turn in objective.turns]).sum()
