from pathlib import Path

from ddp_train.archive.index import runs as runs
from ddp_train.cli.from_python import RunFailed as RunFailed
from ddp_train.cli.from_python import RunResult as RunResult
from ddp_train.cli.from_python import run as run
from ddp_train.interfaces import draw as draw
from ddp_train.interfaces.objective import BatchLoss as BatchLoss
from ddp_train.interfaces.objective import Evaluated as Evaluated
from ddp_train.interfaces.objective import Objective as Objective
from ddp_train.interfaces.objective import Ratio as Ratio
from ddp_train.interfaces.objective import TurnObjective as TurnObjective
from ddp_train.model_log import log as log
from ddp_train.training.inference.finished_run import load as load

__version__: str
FOLDER: Path
CONF: Path
