"""Weights, gradients and optimizer state sharded among the ranks: torch's FSDP2."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import LossModule, RankMemory, Strategy
from ddp_train.interfaces.parameters import blocks_of
from ddp_train.interfaces.strategy import is_sharded
from ddp_train.strategy.means import copy_tensors_from_main
from ddp_train.traits import name_of

logger = logging.getLogger(__name__)

_DType = Literal["bfloat16", "float16", "float32"]


class FSDP(Strategy):
    """Keep a share of every weight, gradient and optimizer state on each rank; a block's weights are put together while it computes.

    Every forward is a collective. One rank alone trains the plain model.

    Args:
        blocks: class names of the modules whose weights come together and go again, one block at a time; auto: all that lie side by side in
            a ModuleList, Sequential or ModuleDict with another one of their class. What is in none of them is together for a whole forward.
        reshard_after_forward: give a block's weights back after its forward, and bring them together again in backward; false keeps them
            until then, which takes their memory and spares that communication.
        replicas: groups of ranks that have all shards each (HSDP): shards travel within a group, gradients' shards between the groups. It
            divides the number of ranks; ranks of one group follow each other.
        param_dtype: bfloat16 or float16: in which type weights travel and compute; shards stay as they are. null: in their own.
        reduce_dtype: in which type gradients are added; null: that of the weights as they compute.
        cpu_offload: shards, their gradients and the optimizer's state lie in the host's memory, pinned, and the optimizer steps there.
        prefetch: so many blocks' weights are asked for before they are needed, forward and backward; each takes its memory. null: torch's
            own way, one block ahead in backward.

    Source: Zhao et al. 2023, arXiv:2304.11277; per-parameter shards as in torch's `fully_shard`.
    """

    shards_parameters = True
    shards_optimizer = True
    argument_ranges: ClassVar = {"prefetch": {"min": 1}}
    divides_ranks = ("replicas",)
    offloads = ("cpu_offload",)

    def __init__(
        self,
        *,
        blocks: str | Sequence[str] = "auto",
        reshard_after_forward: bool = True,
        replicas: int = 1,
        param_dtype: _DType | None = None,
        reduce_dtype: _DType | None = None,
        cpu_offload: bool = False,
        prefetch: int | None = None,
    ) -> None:
        if isinstance(blocks, str) and blocks != "auto":
            raise ConfigError(key="strategy.blocks", happened=f"is {blocks!r}", expected="auto, or a list of class names, as [Block]")
        self._blocks = blocks
        self._offloads, self._reshards = cpu_offload, reshard_after_forward
        self._prefetch, self._replicas = prefetch, replicas
        self.param_dtype: torch.dtype | None = param_dtype and getattr(torch, param_dtype)
        self._reduce_dtype: torch.dtype | None = reduce_dtype and getattr(torch, reduce_dtype)
        self._buffers_are_due, self._accumulates = True, False

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        """Shard the model's parameters in place, with rank 0's values. Collective."""
        if world_size == 1 and not dist.is_initialized():
            return model.to(device)
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

        whole = _without_objective(model)
        if isinstance(whole, FSDPModule):  # called again after `set_trained`: the next forward finds other parameters trained
            return model
        _require_shardable(model)
        mesh = self._mesh(device, world_size)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self._reshards}
        if self._offloads:  # without a GPU there is nothing to pin pages for
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        kinds: dict[str, Any] = {"param_dtype": self.param_dtype, "reduce_dtype": self._reduce_dtype}
        blocks = self._find_blocks(whole)
        for block in reversed(blocks):  # those within others come first
            _fill_from_main(block, device)
            fully_shard(block, **options, mp_policy=MixedPrecisionPolicy(**kinds))
        _fill_from_main(model, device)  # what is in no block
        _fill_from_main(model, device, buffers=True)
        output_dtype = None if self.param_dtype is None else torch.float32
        fully_shard(whole, **options, mp_policy=MixedPrecisionPolicy(**kinds, output_dtype=output_dtype))
        self._set_prefetch(whole, blocks)
        for each in (*blocks, whole):
            kind, own = type(each), type(each).__bases__[-1]  # made by torch of its own class, whose name people, settings and files have
            kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__
        logger.info("fsdp: %d blocks of %s", len(blocks), dict(Counter(type(block).__name__ for block in blocks)))
        if any(True for _ in whole.buffers()):
            whole.register_forward_pre_hook(self._copy_buffers_from_main)
        if isinstance(model, LossModule) and model.objective is not None:  # the model is in its place already
            model.objective.to(device)
        return model

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients' shards stay within a group of replicas; they are reduce-scattered in every backward.

        That costs communication, and keeps a rank from having the gradients of the whole model.
        """
        return self._accumulating(wrapped) if hasattr(_without_objective(wrapped), "set_requires_all_reduce") else nullcontext()

    def reshard(self, trained_module: nn.Module) -> None:
        for each in trained_module.modules():
            if (reshard := getattr(each, "reshard", None)) is not None:
                reshard()

    def rank_memory(self, trained_module: nn.Module, world_size: int) -> RankMemory:
        count, on_host = world_size // self._replicas, self._offloads and (world_size > 1 or dist.is_initialized())
        return RankMemory(parameter_shards=count, gradient_shards=count, optimizer_shards=count, on_host=on_host)

    def _mesh(self, device: torch.device, world_size: int) -> Any:
        """Return the ranks, in groups of those that hold all shards. Each waits as long as the run does, not torch's 30 minutes."""
        from torch.distributed.device_mesh import init_device_mesh

        if self._replicas == 1:
            return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shards",))
        mesh = init_device_mesh(device.type, (self._replicas, world_size // self._replicas), mesh_dim_names=("replicas", "shards"))
        world: Any = dist.group.WORLD
        if (options := world._get_backend(device).options) is not None:  # that of a group whose collectives do not block
            for group in mesh.get_all_groups():
                group._get_backend(device)._set_default_timeout(options._timeout)
        return mesh

    def _find_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules whose own weights come together at a time, each before those within it; not those that share weights."""
        blocks = blocks_of(model, self._blocks, key="strategy.blocks", for_shards=True).values()
        every = _count_owners(model)
        return [block for block in blocks if (own := _count_owners(block)) and all(every[each] == count for each, count in own.items())]

    def _set_prefetch(self, whole: nn.Module, blocks: list[nn.Module]) -> None:
        """Let each block ask for the weights of those that come after it, in forward and in backward, in the order in which they lie."""
        if self._prefetch is None:
            return
        if len(blocks) < 2:
            happened = f"is {self._prefetch}, and the weights of only {len(blocks)} blocks are gathered separately"
            expected = "at least two blocks: one is gathered while the other computes"
            raise conflict("strategy.prefetch", happened, "null, or strategy.blocks=[CLASS]", expected=expected)
        ahead, cut = self._prefetch, cast(list[Any], blocks)
        cast(Any, whole).set_modules_to_forward_prefetch(cut[:ahead])
        for place, block in enumerate(cut):
            block.set_modules_to_forward_prefetch(cut[place + 1 : place + 1 + ahead])
            block.set_modules_to_backward_prefetch(cut[max(0, place - ahead) : place][::-1])

    @contextmanager
    def _accumulating(self, wrapped: nn.Module) -> Iterator[None]:
        whole = cast(Any, _without_objective(wrapped))
        self._accumulates = True
        whole.set_requires_all_reduce(False)
        yield
        whole.set_requires_all_reduce(True)
        self._accumulates = False

    def _copy_buffers_from_main(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Begin each step with rank 0's buffers, as DDP does, which a forward in training may have changed."""
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._buffers_are_due:
            copy_tensors_from_main(module.buffers())
        self._buffers_are_due = not self._accumulates


def _count_owners(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for part in module.modules() for parameter in set(part.parameters(recurse=False)))


def _without_objective(module: nn.Module) -> nn.Module:
    return module.model if isinstance(module, LossModule) else module


def _require_shardable(model: nn.Module) -> None:
    """Refuse parameters that cannot be sharded, and objectives with parameters to train or turns: no forward of the model serves them."""
    if isinstance(model, LossModule):
        objective, name = model.objective, name_of(model.task)
        if model.turn is not None:
            happened = f"is fsdp, and the parts of {name} take turns, each with its own forward"
            raise conflict("strategy", happened, "ddp or zero1", expected="an objective without turns")
        if objective is not None and any(parameter.requires_grad for parameter in objective.parameters()):
            expected = "an objective without, or one whose parameters are in the model"
            raise conflict("strategy", f"is fsdp, and {name} has parameters to train", "ddp or zero1", expected=expected)
    for name, parameter in _without_objective(model).named_parameters():
        if parameter.ndim == 0:
            raise conflict("strategy", f"is fsdp, and the parameter {name} has no dimension", "ddp", expected="one of shape [1]")
        if not parameter.is_contiguous():
            happened = f"is fsdp, and the parameter {name} is not contiguous (channels_last)"
            raise conflict("strategy", happened, "ddp", expected="contiguous parameters, whose rows can be sharded")


@torch.no_grad()
def _fill_from_main(module: nn.Module, device: torch.device, *, buffers: bool = False) -> None:
    """Take rank 0's weights that are not sharded yet, or buffers, one after the other over the device. Collective.

    A rank whose tensors have no values gets others in their places, on the device: those of one block at a time, for they are sharded next.
    """
    filled: dict[Tensor, Tensor] = {}  # tied ones once
    for part in module.modules():
        held: dict[str, Any] = part._buffers if buffers else part._parameters
        for name, tensor in held.items():
            if tensor is not None and not is_sharded(tensor):
                held[name] = filled[tensor] = filled[tensor] if tensor in filled else _values_of_main(tensor, device)


def _values_of_main(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    dist.broadcast(values, src=0)
    if not tensor.is_meta:
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
        return tensor
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
