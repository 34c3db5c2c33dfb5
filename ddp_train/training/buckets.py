"""Where gradients lie on several ranks: in DDP's buckets, or beside them."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.world import World
from ddp_train.loader.device_copy import to_device
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.components import Components


def rebuild_buckets(components: Components, world: World, micro_batch: MicroBatch | None = None) -> None:
    """Bring DDP into the state that it has after its first steps, before a checkpoint is loaded. Collective.

    DDP rebuilds its buckets after the first backward, and where an element lies in a bucket decides the order in which the ranks' values
    are added. Without this, a resumed run on three or more ranks differs from one that never stopped in the last bits. Parameters are
    not touched; buffers and random streams are, so it comes before loading. Twice, because a static graph takes two.

    Where gradients are kept (`keeps_gradients`) they are in the buckets from then on, so a run that begins is settled, too.
    """
    if world.size == 1:
        return
    micro_batch = micro_batch or components.train_loader.peek()
    batch = to_device(micro_batch.batch, world.device) if micro_batch.placed is None else micro_batch.placed
    for _ in range(2):
        components.optimizer.zero_grad(set_to_none=True)  # which would keep the first buckets alive beside those that replace them
        with components.amp.autocast(world.device):
            loss = components.loss(batch)
        loss.backward()
    zero_gradients(components)


def zero_gradients(components: Components) -> None:
    """Forget the gradients of a step."""
    components.optimizer.zero_grad(set_to_none=not keeps_gradients(components))


def keeps_gradients(components: Components) -> bool:
    """Tell whether gradients are zeroed where they are, in DDP's buckets.

    So with accumulation: the first micro-batches of a step would else put theirs beside the buckets, in as much memory again. Without,
    DDP itself moves each one there, and zeroing is work for nothing. Not where a parameter may have none in a step, as optimizers must see.
    """
    module = components.module
    return (
        components.train_loader.grad_accum_steps > 1
        and isinstance(module, DistributedDataParallel)
        and bool(module.gradient_as_bucket_view)
        and not module.find_unused_parameters
    )
