"""Build components in this process, as a run of one rank does."""

from __future__ import annotations

from hydra import compose, initialize_config_dir

from ddp_train import app, config
from ddp_train.build import Components, build
from ddp_train.distributed import alone
from tests.conftest import TINY


def checked(*overrides: str, base: list[str] = TINY) -> config.RunConfig:
    """Compose and check a small run on one CPU process."""
    own = ["cluster=cpu", "cluster.processes_per_node=1", *base, *overrides]
    with initialize_config_dir(str(app.CONF), version_base="1.3"):
        return config.check(compose("config", own))


def components(*overrides: str, base: list[str] = TINY) -> Components:
    """Build a small run's components."""
    run = checked(*overrides, base=base)
    return build(run.tree, run.batch, alone())
