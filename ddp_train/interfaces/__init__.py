"""The seams on one screen: what a component offers, and the types that it gets and gives.

data       a source of samples, and their order
batch      batches, whatever they are made of: their tensors, their size; images on their way to a device
draw       random numbers for the user's step, by the sample
objective  what is minimised and measured, and what computes its loss
parameters the names of parameters, patterns that choose some, the parts that repeat
strategy   how the ranks hold a model together; tensors of which each rank has some rows
run        scheduler, metric writers, callbacks, and the run as callbacks see it

Components import seams from here, functions from their modules, and none of another group.
"""

from ddp_train.interfaces import draw as draw
from ddp_train.interfaces.batch import Batch, Counted, Pixels
from ddp_train.interfaces.data import DataSource, Indices, Sampler
from ddp_train.interfaces.objective import BatchLoss, Evaluated, LossModule, LossSum, Objective, Ratio, TurnObjective, Value
from ddp_train.interfaces.run import Callback, MetricWriter, Run, Scheduler, SupportsImages, SupportsState, SupportsTexts
from ddp_train.interfaces.strategy import ExchangeClock, MemoryKey, RankMemory, Strategy
from ddp_train.traits import Goal
