"""The seams on one screen: what users' code and ours import from here.

data       a source of samples, and their order
component  what objective and scheduler must offer; classes of others, adapted
strategy   how the ranks hold a model together
run        metric writers, callbacks, and the run as callbacks see it
batch      a look into batches
pixels     images on their way to a device
blocks     the parts of a model that repeat
shard      tensors of which each rank has some rows
trained    the module in which an objective with weights joins its model, and the names of parameters

Components import what is here and not each other.
"""

from ddp_train.interfaces.batch import Batch, Counted, batch_size, describe, few, map_tensors, note_size, tensors_of
from ddp_train.interfaces.blocks import blocks_of, repeated_blocks
from ddp_train.interfaces.component import (
    BorrowsWeights,
    Goal,
    HasTurns,
    Objective,
    Scheduler,
    SupportsBindModel,
    SupportsCompare,
    SupportsInfer,
    SupportsPredict,
    adapted,
)
from ddp_train.interfaces.data import DataSource, Indices, Sampler
from ddp_train.interfaces.pixels import Mix, Pixels, as_pair, finished, own_weights
from ddp_train.interfaces.run import Callback, MetricWriter, Run, overrides
from ddp_train.interfaces.shard import as_cut, cut, is_cut, num_replicas, num_shards, own_range, own_rows, range_of
from ddp_train.interfaces.strategy import Place, Shards, Strategy, place_of
from ddp_train.interfaces.trained import Joint, matching, named_parameters, plain_name, whole_loss
