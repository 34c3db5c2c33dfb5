"""Models that return their own loss, as those of Hugging Face transformers do: the batch is a dict of their arguments, `labels` among them.

Shapes: B samples, T tokens, K classes.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_train.interfaces import Batch, Evaluated, Goal, Objective, Ratio, Value
from ddp_train.interfaces.batch import describe
from ddp_train.objective.language_modeling import perplexity
from ddp_train.objective.supervised import at_least_float32, unwrap
from ddp_train.traits import loss_unit

_IGNORED = -100  # a label that counts nowhere, in all of transformers


class Transformers(Objective):
    """Minimise the loss that the model returns. It is a mean over `unit`, by which the global batch is weighed.

    Args:
        unit: "sample"; "token": the labels that are not -100; "next_token": the same without the first of each sample, which no token
            precedes (GPT, Llama). "auto": by the model's class name.
    """

    loss_is_models = True
    needs_labels = True
    binds_without_values = True
    goals: Mapping[str, Goal] = {"loss": "min", "accuracy": "max", "perplexity": "min"}

    def __init__(self, *, unit: Literal["auto", "sample", "token", "next_token"] = "auto") -> None:
        self.unit = unit

    def bind_model(self, model: nn.Module) -> None:
        if self.unit == "auto":
            self.unit = loss_unit(type(model))

    def loss(self, model: nn.Module, batch: Batch) -> Value:
        """Return the model's mean loss over samples, or over the labels that count."""
        return self._loss(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Return `loss`, and `accuracy` where each sample has one label out of K classes; for each sample what `infer` does; and for
        metrics: probabilities [B, K] and labels [B]; else the model's logits and labels, those of next tokens one place apart.
        """
        loss, outputs = self._loss(model, batch)
        labels, logits = batch["labels"], at_least_float32(unwrap(outputs)[0])
        rows = self._predictions(logits) | {"target": labels}
        if logits.ndim == 2 and logits.shape[1] > 1 and labels.ndim == 1 and not labels.is_floating_point():
            return Evaluated({"loss": loss, "accuracy": logits.argmax(dim=1) == labels}, rows, (logits.softmax(dim=1), labels))
        return Evaluated({"loss": loss}, rows, (logits[:, :-1], labels[:, 1:]) if self.unit == "next_token" else (logits, labels))

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
        return self._predictions(at_least_float32(unwrap(model(**inputs))[0]))

    def metrics(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return `loss` (the mean), `perplexity` where it is over tokens, and `accuracy` where each sample has one label."""
        return dict(means) if self.unit == "sample" else {"loss": means["loss"], "perplexity": perplexity(means["loss"])}

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Value, Any]:
        labels, outputs = batch["labels"], model(**batch)
        mean = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
        if mean.ndim:
            raise ValueError(f"the model's loss is {describe(mean)}, and no mean of shape []")
        if self.unit == "sample":
            return mean, outputs
        num_labels = ((labels[:, 1:] if self.unit == "next_token" else labels) != _IGNORED).sum()
        return Ratio(torch.where(num_labels > 0, mean * num_labels, 0.0), num_labels), outputs  # the mean of no labels is 0/0

    def _predictions(self, logits: Tensor) -> dict[str, Tensor]:
        """Return `prediction`: the likeliest class of each sample or token, or the output itself if there is one."""
        return {"prediction": logits.argmax(dim=-1) if logits.ndim > 1 and logits.shape[-1] > 1 else logits.flatten()}
