"""What a failure says where memory was short: the part of the run, and the settings that would help."""

import traceback

from ddp_train.config.run_config import RunConfig
from ddp_train.config.targets.locate import class_of
from ddp_train.config.targets.target import AUTO
from ddp_train.interfaces.run import implements
from ddp_train.system.devices import resolve_device

_MAX_SETTINGS = 3  # that are shown
_PARTS = (  # what the run was at, by the file of a frame of the stack; the first of these that has such a frame
    ("the build of model and data", ("ddp_train/training/build/build.py",)),
    ("the save of a checkpoint", ("ddp_train/training/state/checkpoints.py",)),
    ("the evaluation", ("ddp_train/training/loop/evaluation.py",)),
    ("the optimizer's step", ("torch/optim/", "ddp_train/training/loop/skip_nonfinite.py")),
    ("backward", ("torch/autograd/graph.py", "torch/_tensor.py")),
    ("forward", ("torch/nn/modules/",)),
)


def part_short_of_memory(error: BaseException) -> str:
    """Return the part of the run in which an error was raised; "" where the stack does not tell."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((part for part, places in _PARTS if any(place in file for file in files for place in places)), "")


def settings_for_less_memory(config: RunConfig, part: str) -> str:
    """Return up to three settings that would help most, as they are typed: those that this run has not taken, for one part of it."""
    on_gpu = resolve_device(config.cluster.device) == "cuda"
    size, batch, evaluated = config.loader.micro_batch_size, config.batch.global_batch_size, config.evaluation.batch_size
    checkpointing, logits = config.activation_checkpointing, config.objective.get("chunk_tokens", 0)  # of language models
    is_blocks_taken = checkpointing.blocks is not None and checkpointing.every == 1 and not checkpointing.save_ops
    here = str(config.strategy.get("_target_", "")).lower()

    precision = ["amp=bf16"] if config.amp.get("dtype") is None and on_gpu else []
    chunks = ["objective.chunk_tokens=4096"] if logits is None else []
    blocks = [] if is_blocks_taken else ["activation_checkpointing=full"]
    shards = [f"strategy={name}" for name in ("fsdp", "zero1") if name not in here and config.batch.world_size > 1]
    smaller = []  # half a micro-batch, and the global batch as it is: accumulation follows
    if size == AUTO:
        smaller = [f"loader.micro_batch_size with half of what auto has come to (config.yaml) and trainer.global_batch_size={batch}"]
    elif size > 1:
        smaller = [f"loader.micro_batch_size={size // 2} trainer.global_batch_size={batch} trainer.grad_accum_steps=null"]
    step = [*precision, *chunks, *(blocks if "chunk_tokens" in config.objective else []), *smaller, *blocks, *shards]
    settings = step  # of forward and backward: activations and logits
    if part == "the evaluation":
        metrics = [f"~evaluation.metrics.{name}" for name, node in config.evaluation.metrics.items() if node]
        settings = [*([f"evaluation.batch_size={evaluated // 2}"] if evaluated > 1 else []), *precision, *chunks, *shards, *metrics]
    elif part == "the optimizer's step":
        averages = [
            name for name, node in config.callbacks.items() if node and implements(class_of(node["_target_"]), "evaluation_weights")
        ]
        settings = [*shards, *(f"~callbacks.{name}" for name in averages), *step]
    elif part == "the build of model and data":
        loader = ["loader.on_device=false"] if config.loader.on_device else []
        settings = [*loader, *shards, *(["loader.num_workers=0"] if config.loader.num_workers else [])]
    pieces = "+cluster.env.PYTORCH_ALLOC_CONF=expandable_segments:True, for memory in pieces"
    always = [pieces if on_gpu else "cluster.processes_per_node with fewer processes", "a smaller model"]
    return "; ".join([*dict.fromkeys([*settings, *always])][:_MAX_SETTINGS])
