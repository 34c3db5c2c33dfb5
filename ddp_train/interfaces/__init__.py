"""The seams on one screen: what users' code and ours import from here.

adapted    an object whose class does not inherit from one of our base classes, used as one of that base
data       a source of samples, and their order; a look into batches; images on their way to a device
component  what objective and scheduler must offer
strategy   how the ranks hold a model together; tensors of which each rank has some rows
run        metric writers, callbacks, and the run as callbacks see it
trained    the module in which an objective with weights joins its model, the names of parameters, the parts that repeat

Components import what is here and not each other.
"""

from ddp_train.interfaces.adapted import Adapted, lacking, own_member
from ddp_train.interfaces.component import (
    AnyObjective,
    BorrowsWeights,
    Goal,
    HasUnit,
    Objective,
    Scheduler,
    SupportsBindModel,
    SupportsCompare,
    SupportsInfer,
    SupportsPredict,
    SupportsTurnsAt,
    TurnObjective,
)
from ddp_train.interfaces.data import (
    Batch,
    Counted,
    DataSource,
    Indices,
    Mix,
    Pixels,
    Sampler,
    as_pair,
    batch_size,
    counted_as,
    describe,
    finished,
    map_tensors,
    pixel_shares,
    tensors_of,
)
from ddp_train.interfaces.run import Callback, MetricWriter, Run, SupportsImages, SupportsState, SupportsTexts, overrides
from ddp_train.interfaces.strategy import (
    AdaptedStrategy,
    LocalWeights,
    MemoryKey,
    RankMemory,
    Strategy,
    from_local_rows,
    is_sharded,
    local_range,
    local_rows,
    memory_key,
    num_replicas,
    num_shards,
    shard_like,
    shard_range,
)
from ddp_train.interfaces.trained import Joint, blocks_of, matching, named_parameters, plain_name, repeated_blocks, whole_loss
