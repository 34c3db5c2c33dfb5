"""Checkpointed blocks give the same gradients to the bit, keep less, and show in no name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_train.config.schema import ActivationCheckpointingConfig
from ddp_train.errors import ConfigError
from ddp_train.model.gpt import GPT
from ddp_train.model.mini_resnet import BasicBlock, MiniResNet
from ddp_train.training.build.activation_checkpointing import checkpoint_activations
from tests.unit.parts import components

MATMUL = ["aten.mm", "aten.addmm"]


def settings(blocks: Any = "auto", every: int = 1, save_ops: list[str] | None = None) -> ActivationCheckpointingConfig:
    return ActivationCheckpointingConfig(blocks=blocks, every=every, save_ops=save_ops or [])


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(50, 16, num_layers=4, num_heads=2, width=16, dropout=0.2)


def resnet() -> MiniResNet:
    torch.manual_seed(0)
    return MiniResNet((3, 8, 8), 10, width=4, blocks_per_stage=2, zero_init_residual=False)


def inputs(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(50, (3, 16)) if isinstance(model, GPT) else torch.randn(4, 3, 8, 8)


def step(model: nn.Module) -> tuple[list[Tensor], list[Tensor], int]:
    """Return gradients and buffers after a step, and the bytes that forward keeps beside the model's own tensors."""
    own, kept = {tensor.data_ptr() for tensor in model.parameters()}, {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = inputs(model)
    torch.manual_seed(2)  # dropout
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(given).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return gradients, [buffer.clone() for buffer in model.buffers()], sum(kept.values())


@pytest.mark.parametrize("make", [gpt, resnet])
@pytest.mark.parametrize(
    "config", [settings(), settings(every=2), settings(save_ops=MATMUL), settings(blocks=["FeedForward", "BasicBlock"])], ids=str
)
def test_gradients_and_averages_are_the_same_to_the_bit(make: Any, config: ActivationCheckpointingConfig) -> None:
    if "FeedForward" in config.blocks:
        config = settings(blocks=["FeedForward" if make is gpt else "BasicBlock"])
    model = make()
    names, classes = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    checkpoint_activations(model, config)
    gradients, buffers, _ = step(model)
    expected, averages, _ = step(make())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, expected, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(buffers, averages, strict=True))  # each batch counts once
    assert (list(model.state_dict()), [type(module).__name__ for module in model.modules()]) == (names, classes)


def kept(make: Any, config: ActivationCheckpointingConfig | None) -> int:
    model = make()
    if config is not None:
        checkpoint_activations(model, config)
    return step(model)[2]


@pytest.mark.parametrize("make", [gpt, resnet])
def test_what_forward_keeps_falls_as_the_options_say(make: Any) -> None:
    everything, nothing = kept(make, None), kept(make, settings())
    half = kept(make, settings(every=2))
    assert nothing < 0.5 * everything
    assert nothing < half < everything


def test_selected_operations_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            return func(*args, **(kwargs or {}))

    def products(config: ActivationCheckpointingConfig | None) -> int:
        model = gpt()
        if config is not None:
            checkpoint_activations(model, config)
        with Counts() as counts:
            model(inputs(model)).sum().backward()
        return counts.products

    none = products(None)
    assert products(settings()) > products(settings(save_ops=MATMUL)) == none


def test_without_gradients_nothing_is_checkpointed_and_a_model_can_be_copied() -> None:
    model = resnet().eval()
    checkpoint_activations(model, settings())
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(inputs(model)), resnet().eval()(inputs(model)))
    assert all(isinstance(block, BasicBlock) for block in model.blocks)


class Counting(nn.Module):
    """Changes a buffer of its own in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(given)
        return output


def test_a_block_that_changes_a_buffer_is_refused() -> None:
    model = nn.Sequential(Counting(), Counting())
    checkpoint_activations(model, settings())
    with pytest.raises(ConfigError, match=r"the forward of Counting changes its buffer calls, and is computed twice"):
        model(torch.ones(1, 2)).sum().backward()


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigError, match="is auto, and nothing repeats in the Linear"):
        checkpoint_activations(nn.Linear(1, 1), settings())
    for name in ("aten.no_such_thing", "nonsense", "aten"):
        with pytest.raises(ConfigError, match=f"torch has no operation {name}"):
            checkpoint_activations(gpt(), settings(save_ops=[name]))


def test_the_options_of_the_group_are_applied_before_the_strategy() -> None:
    base = ["model=mini_resnet", "model.width=2", "model.blocks_per_stage=1", "data=synthetic_images", "trainer.max_epochs=1"]
    assert components(*base, base=[]).notes == []
    full = components(*base, "activation_checkpointing=full", base=[])
    assert full.notes == ["memory   3 of 3 blocks (BasicBlock) are recomputed in backward"]
    assert "checkpoint" in full.model.get_submodule("blocks.0").forward.__code__.co_names
    selective = components(*base, "activation_checkpointing=selective", "activation_checkpointing.every=2", base=[])
    assert selective.notes == ["memory   2 of 3 blocks (BasicBlock) are recomputed in backward, except the results of 7 operations"]
