"""Contrastive learning: the embeddings of two views of a sample become nearer to each other than to those of all other samples.

Shapes: B samples of a rank, N samples that are compared, D numbers of an embedding.
A batch is `(view, other_view)`, two augmentations of one sample, or two kinds (image, text).
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.interfaces import Batch, BatchLoss, Evaluated, Goal
from ddp_train.objective.supervised import at_least_float32, unwrap

_CHUNK = 1024  # embeddings that are compared with all others at a time


class Contrastive(BatchLoss):
    """Minimise the cross entropy of finding a sample's other view among those of the batch, both ways.

    Args:
        temperature: divides the cosine similarities; the smaller, the more the nearest other samples count.
        towers: 1: both views go through the model as one batch, and it returns [2B, D]; 2: model(view, other_view) returns two [B, D].
        gathers: the other samples are those of the global batch, so that the gradient is the same on any number of ranks; False: those of
            one rank's micro-batch, `loader.micro_batch_size` of them.

    Source: Oord et al. 2018, arXiv:1807.03748 (InfoNCE); Radford et al. 2021, arXiv:2103.00020 (both ways, the others of the batch).
    """

    goals: Mapping[str, Goal] = {}

    def __init__(self, *, temperature: float = 0.1, towers: Literal[1, 2] = 1, gathers: bool = False) -> None:
        self.temperature, self.towers, self.gathers = temperature, towers, gathers

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross entropy in nats, the mean of both ways and over the samples, shape []."""
        left_ND, right_ND = (self.gather(embeddings_BD) for embeddings_BD in self._embeddings(model, batch))
        similarity_NN = left_ND @ right_ND.mT / self.temperature
        targets_N = torch.arange(len(similarity_NN), device=similarity_NN.device)
        return (F.cross_entropy(similarity_NN, targets_N) + F.cross_entropy(similarity_NN.mT, targets_N)) / 2

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Return what `infer` gives for each sample, and both for metrics."""
        embeddings = self.infer(model, batch)
        return Evaluated({}, embeddings, (embeddings["embedding"], embeddings["other_embedding"]))

    def inputs(self, batch: Batch) -> Batch:
        return batch

    def infer(self, model: nn.Module, inputs: Batch) -> dict[str, Tensor]:
        """Return the `embedding` and `other_embedding` of each sample, float32 [B, D]."""
        left_BD, right_BD = self._embeddings(model, inputs)
        return {"embedding": left_BD.float(), "other_embedding": right_BD.float()}

    def _embeddings(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        view, other_view = batch
        if self.towers == 2:
            left, right, *_ = model(view, other_view)
        else:
            left, right = unwrap(model(torch.cat([view, other_view])))[0].chunk(2)
        return F.normalize(at_least_float32(left), dim=-1), F.normalize(at_least_float32(right), dim=-1)


def recall_at_1(embeddings: Tensor, others: Tensor) -> float:
    """Return the share of samples whose nearest other view is their own; embeddings of length 1, [N, D]."""
    hits = 0
    for start in range(0, len(embeddings), _CHUNK):
        nearest = (embeddings[start : start + _CHUNK] @ others.T).argmax(dim=1)
        hits += int((nearest == torch.arange(start, start + len(nearest), device=nearest.device)).sum())
    return hits / len(embeddings)


recall_at_1.higher_is_better = True  # type: ignore[attr-defined]
