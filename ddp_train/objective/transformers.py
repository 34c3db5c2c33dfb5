"""Models that return their own loss, as those of Hugging Face transformers do: the batch is a dict of their arguments, `labels` among them.

Shapes: B samples, T tokens, K classes.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import Batch, Goal, Scored
from ddp_train.interfaces.batch import batch_size, describe
from ddp_train.objective.supervised import ByCompare, at_least_float32, count, unwrap
from ddp_train.traits import loss_unit

_IGNORED = -100  # a label that counts nowhere, in all of transformers


class Transformers(ByCompare):
    """Minimise the loss that the model returns. It is a mean over `unit`, by which the global batch is weighed.

    Args:
        unit: "sample"; "token": the labels that are not -100; "next_token": the same without the first of each sample, which no token
            precedes (GPT, Llama). "auto": by the model's class name.
    """

    loss_is_models = True
    binds_without_values = True
    goals: Mapping[str, Goal] = {"loss": "min", "accuracy": "max", "perplexity": "min"}

    def __init__(self, *, unit: Literal["auto", "sample", "token", "next_token"] = "auto") -> None:
        self.unit = unit

    def bind_model(self, model: nn.Module) -> None:
        if self.unit == "auto":
            self.unit = loss_unit(type(model))

    def weight(self, batch: Batch) -> int | Tensor:
        """Return the number of samples, or of labels that count, an int64 tensor of shape []."""
        labels = _labels(batch)
        if self.unit == "sample":
            return batch_size(batch)
        return ((labels[:, 1:] if self.unit == "next_token" else labels) != _IGNORED).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's mean loss times the number of units, shape []."""
        return self._loss(model, batch)[0]

    def compare(self, model: nn.Module, batch: Batch) -> Scored:
        """Return the sums `loss` (float64), `units`, `samples`, and `correct` where each sample has one label out of K classes; for each
        sample what `infer` does; and for metrics: probabilities [B, K] and labels [B]; else the model's logits and labels, those of
        next tokens one place apart.
        """
        total, outputs = self._loss(model, batch)
        labels, logits = _labels(batch), at_least_float32(unwrap(outputs)[0])
        units = self.weight(batch)
        totals = {
            "loss": total.double(),
            "units": units if isinstance(units, Tensor) else count(units, labels),
            "samples": count(batch_size(batch), labels),
        }
        rows = self._predictions(logits) | {"target": labels}
        if logits.ndim == 2 and logits.shape[1] > 1 and labels.ndim == 1 and not labels.is_floating_point():
            totals["correct"] = (logits.argmax(dim=1) == labels).sum()
            return Scored(totals, rows, (logits.softmax(dim=1), labels))
        return Scored(totals, rows, (logits[:, :-1], labels[:, 1:]) if self.unit == "next_token" else (logits, labels))

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
        return self._predictions(at_least_float32(unwrap(model(**inputs))[0]))

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return `loss` (the mean), `perplexity` where it is over tokens, and `accuracy` where each sample has one label."""
        loss = totals["loss"] / (totals["units"] or 1)
        if self.unit != "sample":
            return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}  # exp overflows a float above 709
        return {"loss": loss} | ({"accuracy": totals["correct"] / totals["samples"]} if "correct" in totals else {})

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        _labels(batch)
        outputs = model(**batch)
        mean = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(mean, Tensor) or mean.ndim:
            expected = "a model that returns its `loss`, shape [], when it gets labels"
            happened = f"the model gives no loss: {describe(outputs)}"
            raise conflict("objective", happened, "classification, or another one", expected=expected)
        units = self.weight(batch)
        total = mean * units
        # The mean of no units is 0/0, and so would be the step.
        return (torch.where(units > 0, total, 0.0) if isinstance(units, Tensor) else total), outputs

    def _predictions(self, logits: Tensor) -> dict[str, Tensor]:
        """Return `prediction`: the likeliest class of each sample or token, or the output itself if there is one."""
        return {"prediction": logits.argmax(dim=-1) if logits.ndim > 1 and logits.shape[-1] > 1 else logits.flatten()}


def _labels(batch: Batch) -> Tensor:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        expected = "a dict of the model's arguments, with `labels`"
        fix = "loader.fields=null with a data set whose samples are dicts; objective=language_modeling or classification for pairs"
        raise ConfigError(key="data", happened=f"a batch is {describe(batch)}", expected=expected, fix=fix)
    return labels
