"""Distillation: a small model learns from labels and from the outputs of a large, trained model for the same inputs.

Shapes: B samples, K classes. The batch's forms are those of supervised.py; the teacher gets the inputs that the model gets.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.interfaces import Batch
from ddp_train.interfaces.batch import call_model
from ddp_train.objective.classification import Classification
from ddp_train.objective.supervised import at_least_float32, split, unwrap


class Distillation(nn.Module, Classification):
    """Minimise a mixture of the cross entropy with the labels and of the divergence from the teacher's softened answers.

    Metrics are the model's. The teacher is frozen, in evaluation mode, and in no checkpoint: a resumed run builds it again.

    Args:
        teacher: any model of the same inputs and classes.
        teacher_from: its weights: a .safetensors or .pt file, a run or one of its checkpoints; None: the model is built with its weights.
        temperature: divides both models' logits; the larger, the more unlikely classes count.
        teacher_share: share of the teacher's loss, in [0, 1]; the rest is the labels'.
        label_smoothing, aux_weight: of the labels' part, and of the model's auxiliary outputs (classification.py).

    Source: Hinton et al. 2015, arXiv:1503.02531 (the divergence times temperature squared, section 2).
    """

    def __init__(
        self,
        *,
        teacher: nn.Module,
        teacher_from: str | None = None,
        temperature: float = 2.0,
        teacher_share: float = 0.5,
        label_smoothing: float = 0.0,
        aux_weight: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Classification.__init__(self, label_smoothing=label_smoothing, aux_weight=aux_weight)
        self.teacher = teacher.requires_grad_(False).eval()
        self.borrows = {} if teacher_from is None else {"teacher": teacher_from}
        self.temperature, self.teacher_share = temperature, teacher_share

    def training_loss(self, outputs: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        """Return the mixture in nats, shape []."""
        with torch.no_grad():
            teacher_logits_BK = at_least_float32(unwrap(call_model(self.teacher, split(batch)[0]))[0])
        student, teacher = ((logits / self.temperature).log_softmax(dim=1) for logits in (outputs, teacher_logits_BK))
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.temperature**2
        return self.teacher_share * divergence + (1 - self.teacher_share) * self.criterion(outputs, targets)
