"""Data parallelism with a full copy of the model on every rank."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_train.errors import ConfigError, conflict, join_few
from ddp_train.interfaces import ExchangeClock, Strategy
from ddp_train.interfaces.parameters import named_parameters


class DDP(Strategy):
    """Average gradients over the ranks while backward still runs. One rank alone trains the plain model.

    Args:
        gradient_as_bucket_view: gradients live inside the communication buckets; saves one copy of them in memory.
        static_graph: promise that every step uses the same parameters in the same order; torch then looks for unused ones once. Not with
            gradient accumulation.
        find_unused_parameters: search the graph after each forward for parameters without gradient; costs time in every step.
        bucket_cap_mb: size of a bucket in MiB; smaller ones start earlier, larger ones use the network better.
        reduce_dtype: in which type gradients travel and are added; None: in their own.
        sync_batchnorm: batch norms take the mean and variance of all ranks' samples in training; on GPUs.

    Source: Li et al. 2020, arXiv:2006.15704.
    """

    has_buckets = True
    exchange_is_timed = True
    refuses_accumulation = ("static_graph",)  # torch reduces wrongly, still in 2.13 (pytorch issue 143580, pull request 187732)
    gradients_stay_with: ClassVar = {"gradient_as_bucket_view": True, "find_unused_parameters": False}

    def __init__(
        self,
        *,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float = 25,
        reduce_dtype: Literal["bfloat16", "float16"] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        self.graph_is_static, self.clock = static_graph, ExchangeClock()
        self._watched = set[nn.Parameter]()  # the first ones of what is wrapped, whose gradients mostly come last
        self._reduce_dtype, self._sync_batchnorm = reduce_dtype, sync_batchnorm
        self._ddp_options: dict[str, Any] = {
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
        }

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        model = model.to(device)
        if world_size == 1 and not dist.is_initialized():
            return model
        if self._sync_batchnorm:
            model = _synchronised(model)
        module = _DDPModule(model, device_ids=[device] if device.type == "cuda" else None, **self._ddp_options)
        module.strategy = self
        first = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        if first not in self._watched:  # by an earlier call
            first.register_post_accumulate_grad_hook(self._queue_clock)
            self._watched.add(first)
        if (hook := self._comm_hook()) is not None:
            module.register_comm_hook(None, hook)
        return module

    def set_clock(self, clock: ExchangeClock) -> None:
        self.clock = clock

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients local. Forward must be inside, too."""
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def zeroes_gradients_in_place(self, wrapped: nn.Module) -> bool:
        """Tell whether gradients stay in the buckets. Else the first micro-batch of a step allocates them again, next to the buckets.

        False where a parameter may have no gradient in a step: the optimizer must see None.
        """
        is_ddp = isinstance(wrapped, DistributedDataParallel)
        return is_ddp and bool(wrapped.gradient_as_bucket_view) and not wrapped.find_unused_parameters

    def _queue_clock(self, parameter: Tensor) -> None:
        """Let torch call the clock at the end of this backward, before DDP waits: DDP queues its wait with the last gradient."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.clock.begin_in_backward)

    def _comm_hook(self) -> Callable[[Any, Any], Future[Tensor]] | None:
        """Return torch's hook that exchanges a bucket of gradients in another type; None: torch's own way."""
        if self._reduce_dtype is None:
            return None
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # which takes its time

        return default_hooks.bf16_compress_hook if self._reduce_dtype == "bfloat16" else default_hooks.fp16_compress_hook


def _synchronised(model: nn.Module) -> nn.Module:
    """Replace each batch norm of the model by one over the samples of all ranks, with the same parameters and buffers."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        expected = "a model with nn.BatchNorm1d, 2d or 3d"
        raise conflict("strategy.sync_batchnorm", "is true, and the model has no batch norm", "false", expected=expected)
    if all(isinstance(norm, nn.SyncBatchNorm) for norm in norms):  # others are trained than before
        return model
    synchronised: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return synchronised


class _DDPModule(DistributedDataParallel):
    """torch's DDP, whose exchanges are timed, and which names the parameters that had no gradient in the step before."""

    strategy: DDP  # whose clock times the exchanges

    def forward(self, *inputs: Any, **named: Any) -> Any:
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            unused_numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if unused_numbers is None:
                raise
            raise _unused_parameters(self.module, [int(number) for number in unused_numbers[1].split()]) from None

    def _sync_buffers(self) -> None:
        """Copy rank 0's buffers before a forward, which waits for it."""
        with self.strategy.clock.around():
            super()._sync_buffers()  # type: ignore[no-untyped-call]


def _unused_parameters(module: nn.Module, numbers: Sequence[int]) -> ConfigError:
    """Return the error for parameters without a gradient, by torch's numbers."""
    trained = [name for name, parameter in named_parameters(module).items() if parameter.requires_grad]  # in the order of the numbers
    unused = [trained[number] for number in numbers]
    part = f"{len(unused)} of the model's {len(trained)} parameters"
    happened = f"is false, and {part} did not contribute to the last step's loss: {join_few(unused)}"
    expected = "a gradient for every parameter in every step, for which DDP waits; or requires_grad=False"
    return conflict("strategy.find_unused_parameters", happened, "true", expected=expected)
