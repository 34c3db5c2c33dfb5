"""The seams on one screen: what users' code and ours import from here.

component  what data, objective, scheduler and mixed precision must offer
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
    Adopting,
    Amp,
    Augmenting,
    Borrowing,
    ChoosingTurns,
    Comparing,
    Counting,
    DataSource,
    GivingPixels,
    Goal,
    Indices,
    Inferring,
    Labelled,
    Located,
    Meaningful,
    Measured,
    Meeting,
    Objective,
    Predicting,
    Recognisable,
    Resident,
    Sampler,
    Scheduler,
    TakingTurns,
    adapted,
)
from ddp_train.interfaces.pixels import Mix, Pixels, as_pair, finished, own_weights
from ddp_train.interfaces.run import Averaging, Callback, ImageWriter, MetricWriter, Run, TextWriter
from ddp_train.interfaces.shard import as_cut, cut, is_cut, num_replicas, num_shards, own_range, own_rows, range_of
from ddp_train.interfaces.strategy import Place, Shards, Strategy, place_of
from ddp_train.interfaces.trained import Joint, matching, named_parameters, plain_name, whole_loss

__all__ = [
    "Adopting",
    "Amp",
    "Augmenting",
    "Averaging",
    "Batch",
    "Borrowing",
    "Callback",
    "ChoosingTurns",
    "Comparing",
    "Counted",
    "Counting",
    "DataSource",
    "GivingPixels",
    "Goal",
    "ImageWriter",
    "Indices",
    "Inferring",
    "Joint",
    "Labelled",
    "Located",
    "Meaningful",
    "Measured",
    "Meeting",
    "MetricWriter",
    "Mix",
    "Objective",
    "Pixels",
    "Place",
    "Predicting",
    "Recognisable",
    "Resident",
    "Run",
    "Sampler",
    "Scheduler",
    "Shards",
    "Strategy",
    "TakingTurns",
    "TextWriter",
    "adapted",
    "as_cut",
    "as_pair",
    "batch_size",
    "blocks_of",
    "cut",
    "describe",
    "few",
    "finished",
    "is_cut",
    "map_tensors",
    "matching",
    "named_parameters",
    "note_size",
    "num_replicas",
    "num_shards",
    "own_range",
    "own_rows",
    "own_weights",
    "place_of",
    "plain_name",
    "range_of",
    "repeated_blocks",
    "tensors_of",
    "whole_loss",
]
