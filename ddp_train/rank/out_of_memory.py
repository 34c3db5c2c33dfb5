"""What is said when memory is short: in which part of a run, and which of its settings would help most there."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from ddp_train.config.check import CONF
from ddp_train.config.run_config import RunConfig
from ddp_train.config.targets.target import AUTO
from ddp_train.system.devices import resolve_device
from ddp_train.system.module_names import source_path

_MOST = 3  # settings that are shown
_PARTS = (  # where a frame of the stack lies -> what the run was at; the first that is met from the outermost frame inwards, in this order
    ("the build of model and data", (source_path("ddp_train.training.build.build"),)),
    ("the save of a checkpoint", (source_path("ddp_train.training.state.checkpoints"),)),
    ("the evaluation", (source_path("ddp_train.training.loop.evaluation"),)),
    ("the optimizer's step", ("torch/optim/", source_path("ddp_train.training.loop.skip_nonfinite"))),
    ("backward", ("torch/autograd/graph.py", "torch/_tensor.py")),
    ("forward", ("torch/nn/modules/",)),
)


def part_of(error: BaseException) -> str:
    """Return what the run was at; "" where the stack does not tell."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((part for part, places in _PARTS if any(place in file for file in files for place in places)), "")


def advice(config: RunConfig, part: str) -> str:
    """Return up to three settings that would help most, as they are typed, for a part of this run."""
    found = {"the evaluation": _evaluation, "the optimizer's step": _optimizer, "the build of model and data": _build}.get(part, _step)
    settings = dict.fromkeys([*found(config), *_always(config)])
    return "; ".join([*settings][:_MOST])


def _step(config: RunConfig) -> Iterator[str]:
    """Forward and backward: activations and logits."""
    if config.amp.get("dtype") is None and resolve_device(config.cluster.device) == "cuda":
        yield "amp=bf16"
    checkpointing, blocks = config.activation_checkpointing, []
    if checkpointing.blocks is None or checkpointing.every > 1 or checkpointing.save_ops:
        blocks = ["activation_checkpointing=full"]
    if "chunk_tokens" in config.objective:  # of language models, which are made of blocks
        yield from ["objective.chunk_tokens=4096"] if config.objective["chunk_tokens"] is None else []
        yield from blocks
    yield from _smaller_batch(config)
    yield from blocks
    yield from _shards(config)


def _optimizer(config: RunConfig) -> Iterator[str]:
    yield from _shards(config)
    yield from (f"~callbacks.{name}" for name, node in config.callbacks.items() if node and str(node.get("_target_", "")).endswith(".EMA"))
    yield from _step(config)


def _build(config: RunConfig) -> Iterator[str]:
    if config.loader.on_device:
        yield "loader.on_device=false"
    yield from _shards(config)
    if config.loader.num_workers:
        yield "loader.num_workers=0"


def _evaluation(config: RunConfig) -> Iterator[str]:
    size = config.evaluation.batch_size
    if size > 1:
        yield f"evaluation.batch_size={size // 2}"
    yield from (setting for setting in _step(config) if setting.startswith(("amp", "objective", "strategy")))
    yield from (f"~evaluation.metrics.{name}" for name, node in config.evaluation.metrics.items() if node)


def _smaller_batch(config: RunConfig) -> Iterator[str]:
    """Half a micro-batch, and the global batch as it is: accumulation follows."""
    size, batch = config.loader.micro_batch_size, config.batch.global_batch_size
    if size == AUTO:
        yield f"loader.micro_batch_size with half of what auto has come to (config.yaml) and trainer.global_batch_size={batch}"
    elif size > 1:
        yield f"loader.micro_batch_size={size // 2} trainer.global_batch_size={batch} trainer.grad_accum_steps=null"


def _shards(config: RunConfig) -> Iterator[str]:
    """Strategies that cut what all ranks hold into shards, where there are several ranks, and this is none of them."""
    here = str(config.strategy.get("_target_", "")).lower()
    if config.batch.world_size > 1:
        yield from (f"strategy={name}" for name in ("fsdp", "zero1") if name not in here and (CONF / f"strategy/{name}.yaml").exists())


def _always(config: RunConfig) -> Iterator[str]:
    if resolve_device(config.cluster.device) == "cuda":
        yield "+cluster.env.PYTORCH_ALLOC_CONF=expandable_segments:True, for memory in pieces"
    else:
        yield "cluster.processes_per_node with fewer processes"
    yield "a smaller model"
