"""When memory is short the part of the run is named, and what would help there: settings that this run has not taken yet."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.rank.out_of_memory import part_short_of_memory, settings_for_less_memory
from ddp_train.training.check.memory import is_out_of_memory
from ddp_train.training.train_state import TrainState
from tests.unit.parts import checked, components, trainer

TOO_MUCH = 1 << 50


class Greedy(torch.autograd.Function):
    """Takes too much in backward."""

    @staticmethod
    def forward(context: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return torch.empty(TOO_MUCH, dtype=torch.uint8)


def raised(where: str) -> BaseException:
    """Return the error of a run in which a part takes too much."""
    parts = components("trainer.max_steps=1")
    if where in ("forward", "evaluation"):

        def takes(module: nn.Module, given: Any, output: Tensor) -> None:
            if module.training == (where == "forward"):
                torch.empty(TOO_MUCH, dtype=torch.uint8)

        parts.model.register_forward_hook(takes)
    elif where == "backward":
        parts.model.register_forward_hook(lambda module, given, output: Greedy.apply(output))
    else:
        parts.optimizer.register_step_pre_hook(lambda *_: torch.empty(TOO_MUCH, dtype=torch.uint8) and None)
    with pytest.raises(RuntimeError) as found:
        trainer(parts, TrainState()).train()  # with an evaluation at its end
    assert is_out_of_memory(found.value)
    return found.value


@pytest.mark.parametrize(
    ("where", "part"),
    [("forward", "forward"), ("backward", "backward"), ("optimizer", "the optimizer's step"), ("evaluation", "the evaluation")],
)
def test_the_part_is_told_by_the_stack(where: str, part: str) -> None:
    assert part_short_of_memory(raised(where)) == part


def test_settings_are_those_that_the_run_has_not_taken() -> None:
    images = checked("loader.micro_batch_size=32", "trainer.global_batch_size=64", base=[])
    smaller = "loader.micro_batch_size=16 trainer.global_batch_size=64 trainer.grad_accum_steps=null"
    assert settings_for_less_memory(images, "forward").split("; ")[:2] == [smaller, "activation_checkpointing=full"]
    text = ["data=char_text", "data.path=README.md", "model=gpt", "objective=language_modeling"]
    assert settings_for_less_memory(checked(*text, base=[]), "backward").startswith(
        "objective.chunk_tokens=4096; activation_checkpointing=full; loader."
    )
    taken = [
        *text,
        "objective.chunk_tokens=64",
        "activation_checkpointing=full",
        "loader.micro_batch_size=2",
        "trainer.global_batch_size=2",
    ]
    assert settings_for_less_memory(checked(*taken, base=[]), "backward").startswith(
        "loader.micro_batch_size=1 trainer.global_batch_size=2 "
    )
    assert settings_for_less_memory(checked("evaluation.batch_size=100", base=[]), "the evaluation").startswith("evaluation.batch_size=50")
    assert settings_for_less_memory(checked("loader.on_device=true", base=[]), "the build of model and data").startswith(
        "loader.on_device=false"
    )
    assert "~callbacks.ema" in settings_for_less_memory(checked("callbacks=ema", base=[]), "the optimizer's step")
    gpu = checked(
        "amp=off", "cluster.device=cuda", "cluster.nodes=2", "cluster.launcher=machines", "cluster.rendezvous_endpoint=a:1", base=[]
    )
    assert settings_for_less_memory(gpu, "forward").startswith("amp=bf16; ")
    for part in ("forward", "backward", "the optimizer's step", "the evaluation", ""):
        assert len(settings_for_less_memory(images, part).split("; ")) == 3
