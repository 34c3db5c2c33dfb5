"""Several optimizers behind one interface, each for other parameters; and Muon for hidden weight matrices with AdamW for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError, join_few
from ddp_train.interfaces import LossModule
from ddp_train.interfaces.parameters import matching, named_parameters
from ddp_train.optimizer.groups import split_by_decay
from ddp_train.traits import has_modes

logger = logging.getLogger(__name__)


class Several(torch.optim.Optimizer):
    """Several torch optimizers for different parameters behind one interface. Their order is part of the state's format.

    The parts share this optimizer's groups and state: schedulers, gradient scalers and checkpoints see one ordinary optimizer. A part whose
    parameters have no gradient does nothing, as while other parts take their turn.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.optimizers = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.optimizers:
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also the end of load_state_dict, which makes new groups and a new state
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.optimizers:
            part.param_groups, part.state = list(islice(groups, len(part.param_groups))), self.state


def several(model: nn.Module, *, parts: Mapping[str, Callable[..., torch.optim.Optimizer]]) -> Several:
    """Train each part of a model (generator and discriminator) with its own optimizer. Biases and norm weights are not decayed.

    Args:
        model: after the strategy has prepared it.
        parts: name of a part of the model (a pattern, as in `optimizer.groups`) -> its optimizer, which still needs its parameters.
    """
    named = {name: parameter for name, parameter in named_parameters(model).items() if parameter.requires_grad}
    remaining, optimizers = dict(named), []
    for part, make in parts.items():
        names = matching(named, [part], key="optimizer.parts")
        if shared := [name for name in named if name in names and name not in remaining]:
            raise ConfigError(key=f"optimizer.parts.{part}", happened=f"{shared[0]} is in an earlier part", expected="one part")
        parameters = [remaining.pop(name) for name in named if name in names]
        optimizer = make(split_by_decay(parameters, getattr(make, "keywords", {}).get("weight_decay")))
        optimizers.append(optimizer)
        if has_modes(optimizer):
            happened = f"{type(optimizer).__name__} evaluates other weights than it trains, which the other parts would not follow"
            expected = "an ordinary optimizer as a part; a schedule-free one trains the whole model"
            fix = "optimizer=custom with its optimizer._target_"
            raise ConfigError(key=f"optimizer.parts.{part}", happened=happened, expected=expected, fix=fix)
    if remaining:
        happened = f"{len(remaining)} parameters are in no part: {join_few([*remaining])}"
        raise ConfigError(key="optimizer.parts", happened=happened, expected="each in one part")
    return Several(*optimizers)


def muon(
    model: nn.Module,
    *,
    lr: float = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr_fn: str = "original",
    adamw_lr: float = 3e-4,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    adamw_weight_decay: float = 0.1,
    adamw_fused: bool = True,
    head_names: Sequence[str] = ("head", "lm_head", "classifier"),
) -> MuonAdamW:
    """Train hidden weight matrices with Muon, and everything else with AdamW.

    AdamW gets embeddings (and tensors tied to them), the output head, convolution kernels, biases, normalisations, and all of an objective.

    Args:
        model: after the strategy has prepared it.
        lr: peak learning rate of the matrices.
        momentum: of the matrices' averaged gradient, in [0, 1).
        weight_decay: of the matrices.
        nesterov: look ahead by one momentum step.
        ns_steps: Newton-Schulz iterations that make the update orthogonal, below 100.
        adjust_lr_fn: scale a matrix's rate by its shape: "original" or "match_rms_adamw", with which AdamW's own lr and decay fit.
        adamw_lr: peak learning rate of everything else.
        adamw_betas: decay of the running averages of gradient and squared gradient.
        adamw_eps: added to the denominator.
        adamw_weight_decay: of embeddings, head and kernels; biases and normalisations have none.
        adamw_fused: one kernel for all parameters.
        head_names: last part of the output layer's module name.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv:2502.16982 ("match_rms_adamw").
    """
    matrices, others = _split_by_role(model, head_names)
    if not matrices:
        raise ConfigError(key="optimizer", happened="no hidden weight matrix for Muon", expected="linear layers", fix="optimizer=adamw")
    # The split goes by names and shapes; these two numbers show a wrong one (a head with an unknown name).
    logger.info("Muon trains %d matrices with %.1f M weights, AdamW %d tensors with %.1f M", *_size(matrices), *_size(others))
    parts: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
        )
    ]
    if others:
        groups = split_by_decay(others, adamw_weight_decay)
        beta1, beta2 = adamw_betas
        parts.append(torch.optim.AdamW(groups, lr=adamw_lr, betas=(beta1, beta2), eps=adamw_eps, fused=adamw_fused))
    return MuonAdamW(*parts)


def _split_by_role(model: nn.Module, head_names: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden weight matrices, and all other parameters that are trained, each in the model's order."""
    elsewhere = {
        id(parameter)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or name.rpartition(".")[2] in head_names
        for parameter in module.parameters()
    }
    if isinstance(model, LossModule) and model.objective is not None:  # centres and the like are no layers
        elsewhere |= {id(parameter) for parameter in model.objective.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in elsewhere]
    return matrices, [parameter for parameter in trained if parameter.ndim != 2 or id(parameter) in elsewhere]


class MuonAdamW(Several):
    needs_whole_matrices = True


def _size(parameters: Sequence[Tensor]) -> tuple[int, float]:
    return len(parameters), sum(parameter.numel() for parameter in parameters) / 1e6
