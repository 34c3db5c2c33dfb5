"""The memory of a run: what a rank has and will have, what a checkpoint takes, which errors say that it is short, and what would help."""

import logging
import re
import traceback
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.codec import leaf_of
from ddp_train.checkpoint.layout import SHARED, divide_shared
from ddp_train.config.run_config import RunConfig
from ddp_train.config.targets.locate import class_of
from ddp_train.config.targets.target import AUTO
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import SupportsState
from ddp_train.interfaces.run import implements
from ddp_train.interfaces.strategy import is_sharded, local_rows, shard_range
from ddp_train.system.devices import resolve_device
from ddp_train.system.process import resident_bytes
from ddp_train.training.parts.components import Components
from ddp_train.traits import has_modes

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = re.compile(
    r"\bout of memory\b|can't allocate memory|CU(DNN|BLAS|FFT|SOLVER|SPARSE)_(STATUS_)?ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate|CUDNN_STATUS_\w+_ALLOCATION_FAILED"
    r"|Failed to CUDA (calloc|malloc)|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)
"""Messages of torch's allocator, the CUDA runtime and driver, cuBLAS, cuDNN, NCCL and Triton. cuBLAS and cuSOLVER name no memory where they
find none for their handle."""
_MIB = 2.0**20
_MAX_SHARE = 0.95  # of a device; libraries take more of it, outside of torch's allocator
_BYTES_PER_RANK = 1 << 16  # random streams and the position in the data; manifests and headers come to less
_MAX_SETTINGS = 3  # that are shown
_PARTS = (  # what the run was at, by the file of a frame of the stack; the first of these that has such a frame
    ("the build of model and data", ("ddp_train/training/build/build.py",)),
    ("the save of a checkpoint", ("ddp_train/training/state/checkpoints.py",)),
    ("the evaluation", ("ddp_train/training/loop/evaluation.py",)),
    ("the optimizer's step", ("torch/optim/", "ddp_train/training/loop/skip_nonfinite.py")),
    ("backward", ("torch/autograd/graph.py", "torch/_tensor.py")),
    ("forward", ("torch/nn/modules/",)),
)


def print_memory_use(components: Components, world: World) -> None:
    """Called after the first step that this process takes: rank 0 prints, every rank warns in its log. Does not wait for the device."""
    parts, warning = memory_by_part(components, num_ranks=world.size), ""
    sizes = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size]
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(world.device)
        on_device = 0 if components.strategy.rank_memory(components.trained_module, world.size).on_host else sum(parts.values())
        sizes.append(f"activations and all else {format_bytes(max(0, peak - on_device))}, at most {format_bytes(peak)} at a time")
        total = torch.cuda.get_device_properties(world.device).total_memory
        share = torch.cuda.max_memory_reserved(world.device) / total
        if share > _MAX_SHARE:
            warning = (
                f"warning  {share:.0%} of the {format_bytes(total)} of rank {world.rank}'s device are in use: a longer or larger batch may"
                " not fit. A smaller loader.micro_batch_size, activation_checkpointing=full or amp=bf16 leave more"
            )
    else:
        sizes.append(f"the process has {format_bytes(resident_bytes())}")
    for level, line in ((logging.INFO, f"memory   {', '.join(sizes)}"), (logging.WARNING, warning)):
        if line:
            logger.log(level, line)
            world.print(line)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory of the device or the machine was short."""
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def format_bytes(size: int) -> str:
    return f"{size / _MIB / 1024:.2f} GiB" if size >= 1024 * _MIB else f"{size / _MIB:.1f} MiB"


def estimate_checkpoint(components: Components, *, num_ranks: int) -> int:
    """Return how many bytes a checkpoint will have: the tensors of model, optimizer and callbacks, and a little for each rank.

    Tensors count before they exist: those that the optimizer makes in its first step, and the averages of a callback. Raises ConfigError:
    there are too many tensors; no checkpoint could name them.
    """
    states = {part: module.state_dict().items() for part, module in components.modules.items()}
    model = {f"{part}.{name}": value for part, items in states.items() for name, value in items if isinstance(value, Tensor)}
    weights = {local_rows(tensor).untyped_storage()._cdata: tensor.nbytes for tensor in model.values()}  # tied ones once; on meta no memory
    optimizer, callbacks = _optimizer_tensors(components.optimizer), _callback_tensors(components)
    leaves = [leaf_of(f"{SHARED}.{name}", _without_values(value)) for name, value in (model | optimizer | callbacks).items()]
    try:
        for pieces in divide_shared(leaves, num_ranks, written_in_shares=[*components.modules, "optimizer"]):
            tensor_file.make_header([(piece.name, piece.dtype, piece.shape) for piece in pieces])
    except tensor_file.TensorFileError as error:
        happened = f"{len(model):,} tensors of the model and {len(optimizer):,} of the optimizer are too many: {error.happened}"
        expected = f"{error.expected}, some 150,000 tensors for each rank's file"
        fix = "layers or experts that are alike in one parameter, [EXPERTS, ...]; or more ranks, of which each writes a share"
        raise ConfigError(key="model", happened=happened, expected=expected, fix=fix) from None
    parameters = [parameter for group in components.optimizer.param_groups for parameter in group["params"]]
    both_modes = sum(parameter.nbytes for parameter in parameters) if has_modes(components.optimizer) else 0  # evaluated and trained
    of_weights, of_optimizer, of_callbacks = sum(weights.values()), _bytes(optimizer), _bytes(callbacks)
    strategy = components.strategy
    of_exchange = strategy.rank_memory(components.trained_module, num_ranks).exchange_bytes
    of_ranks = num_ranks * _BYTES_PER_RANK + (num_ranks if strategy.state_is_per_rank else 1) * of_exchange
    if strategy.weights_are_per_rank and num_ranks > 1:  # each rank saves them
        of_ranks += num_ranks * (of_weights + of_callbacks) + (num_ranks - 1) * of_optimizer
    return of_weights + both_modes + of_optimizer + of_callbacks + of_ranks


def estimate_share(components: Components, world: World) -> int:
    """Return about how many bytes of a checkpoint this rank writes: an equal part, and rank 0 all that callbacks keep of a whole model."""
    of_rank_0 = 0 if components.forward_is_collective else _bytes(_callback_tensors(components))
    return (estimate_checkpoint(components, num_ranks=world.size) - of_rank_0) // world.size + (of_rank_0 if world.is_main else 0)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def memory_to_come(components: Components, *, num_ranks: int = 1) -> int:
    """Return how many bytes of its device the first step will add to those that a rank has now.

    These are the optimizer's state, averages that a callback makes when training begins, and what a strategy keeps between two exchanges.
    """
    if components.strategy.rank_memory(components.trained_module, 2).on_host and any(map(is_sharded, components.model.parameters())):
        return 0
    later = memory_by_part(components, num_ranks=num_ranks)
    state = [value for values in components.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return sum(later.values()) - later["parameters"] - later["gradients"] - sum(local_rows(value).nbytes for value in state)


def memory_by_part(components: Components, *, num_ranks: int) -> dict[str, int]:
    """Return the bytes that a rank keeps from step to step, by part: of the rank that keeps most. The build need not be sharded.

    Gradients are as large as their parameters; between two steps there may be none.
    """
    memory, model = components.strategy.rank_memory(components.trained_module, num_ranks), set(components.model.parameters())
    trained = list(components.trained_module.parameters())
    parameters = sum(_shard_bytes(parameter, memory.parameter_shards if parameter in model else 1) for parameter in trained)
    gradients = [] if components.steps_in_backward else [parameter for parameter in trained if parameter.requires_grad]
    return {
        "parameters": parameters + sum(buffer.nbytes for buffer in components.trained_module.buffers()),
        "gradients": sum(_shard_bytes(parameter, memory.gradient_shards) for parameter in gradients),
        "optimizer": sum(_shard_bytes(value, memory.optimizer_shards) for value in _optimizer_tensors(components.optimizer).values()),
        "exchange": memory.exchange_bytes,
        "callbacks": sum(
            _shard_bytes(value, memory.parameter_shards if name.split(".")[1] == components.averaging else 1)
            for name, value in _callback_tensors(components).items()
        ),
    }


def _shard_bytes(tensor: Tensor, shards: int) -> int:
    """Return the bytes of the first of so many shards, which is the largest; a tensor without dimensions is whole on each rank."""
    return tensor.nbytes if shards == 1 or not tensor.ndim else shard_range(tensor.shape, shards, 0)[1] * tensor.itemsize


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _callback_tensors(components: Components) -> dict[str, Tensor]:
    """Return the tensors that callbacks keep, by their names. Averages that do not exist yet stand for themselves without values."""
    tensors: dict[str, Tensor] = {}
    for name, callback in components.callbacks.items():
        if not isinstance(callback, SupportsState):
            continue
        _, saved = codec.encode(callback.state_dict(), f"callbacks.{name}")
        if name == components.averaging and not saved:  # they will be in float32 at least
            saved = {
                f"callbacks.{name}.averages.{key}": _without_values(parameter).to(torch.promote_types(parameter.dtype, torch.float32))
                for key, parameter in components.model.named_parameters()
            }
        tensors |= saved
    return tensors


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps, by their names; those that do not exist yet have no values."""
    tensors: dict[str, Tensor] = {}
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, (parameter, group) in enumerate(parameters):
        like, state = _without_values(parameter), optimizer.state.get(parameter)
        if state:
            kept = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        elif "betas" in group:
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
            kept = {"step": torch.empty((), device="meta"), **dict.fromkeys(names, like)}
        elif isinstance(optimizer, torch.optim.SGD) or "ns_steps" in group:  # Muon has a momentum, too
            kept = {"momentum_buffer": like} if group["momentum"] else {}
        else:
            kept = {"average": like, "average_sq": like}
        tensors |= {f"optimizer.state.{number}.{name}": value for name, value in kept.items()}
    return tensors


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
        metrics = [f"~evaluation.metrics.{name}" for name, metric_config in config.evaluation.metrics.items() if metric_config]
        settings = [*([f"evaluation.batch_size={evaluated // 2}"] if evaluated > 1 else []), *precision, *chunks, *shards, *metrics]
    elif part == "the optimizer's step":
        wanted = {name: callback_config["_target_"] for name, callback_config in config.callbacks.items() if callback_config}
        names = [name for name, target in wanted.items() if implements(class_of(target), "evaluation_weights")]
        settings = [*shards, *(f"~callbacks.{name}" for name in names), *step]
    elif part == "the build of model and data":
        loader = ["loader.on_device=false"] if config.loader.on_device else []
        settings = [*loader, *shards, *(["loader.num_workers=0"] if config.loader.num_workers else [])]
    pieces = "+cluster.env.PYTORCH_ALLOC_CONF=expandable_segments:True, for memory in pieces"
    always = [pieces if on_gpu else "cluster.processes_per_node with fewer processes", "a smaller model"]
    return "; ".join([*dict.fromkeys([*settings, *always])][:_MAX_SETTINGS])
