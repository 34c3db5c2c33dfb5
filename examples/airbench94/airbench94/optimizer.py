"""Nesterov SGD whose rate, momentum and decay hardly depend on each other."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD


def decoupled_sgd(
    model: nn.Module, *, lr: float = 11.5, momentum: float = 0.85, weight_decay: float = 0.0153, norm_bias_scale: float = 64.0
) -> SGD:
    """Return torch's SGD with Nesterov momentum, its rate and decay converted from forms that can be tuned one by one.

    Momentum makes torch's steps longer, and a higher rate makes its decay stronger. Here the rate is divided by 1 + 1 / (1 - momentum), and
    the decay by the rate. Along a gradient that stays the same torch's step is 1 / (1 - momentum) times its rate, so that a step goes
    `lr` / (2 - momentum) times the gradient, and takes `weight_decay` / (2 - momentum) of the weights away: the published form. A schedule
    is a factor of both.

    All parameters that are trained are decayed. Biases of batch norms have a rate of their own, and the decay of the others.

    Args:
        model: after the strategy has prepared it.
        lr: of a step at the peak, as above.
        momentum: in (0, 1).
        weight_decay: of a step at the peak, as above.
        norm_bias_scale: how many times `lr` the rate of batch norms' biases is.

    Source: Page 2018, "How to train your ResNet", part 5 (hyperparameters), and 8 (biases); Jordan 2024, arXiv:2404.00498, section 3.4.
        Theirs are for 1,024 samples a step: with another batch size rate and decay are to be scaled by it.
    """
    for name, value, is_fine, expected in (
        ("momentum", momentum, 0 < momentum < 1, "between 0 and 1"),
        ("lr", lr, lr > 0, "above 0"),
        ("norm_bias_scale", norm_bias_scale, norm_bias_scale > 0, "above 0"),
    ):
        if not is_fine:
            raise ValueError(f"{name} is {value}, and a number {expected} is needed")
    biases = {
        id(module.bias): module.bias
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.bias is not None and module.bias.requires_grad
    }
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in biases]
    rate = lr / (1 + 1 / (1 - momentum))
    groups = [
        {"params": others, "lr": rate, "weight_decay": weight_decay / lr},
        {"params": [*biases.values()], "lr": rate * norm_bias_scale, "weight_decay": weight_decay / (lr * norm_bias_scale)},
    ]
    return SGD([group for group in groups if group["params"]], momentum=momentum, nesterov=True)
