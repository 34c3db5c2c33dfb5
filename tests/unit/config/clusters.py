"""Clusters whose environment is given."""

from __future__ import annotations

from typing import Any

import yaml

from ddp_train import CONF
from ddp_train.config.cluster import Rendezvous, rendezvous_of
from ddp_train.config.schema import ClusterConfig, as_dataclass

_LOCAL = yaml.safe_load((CONF / "cluster/local.yaml").read_text())


def cluster_with(**values: Any) -> ClusterConfig:
    """Return a section that leaves to the environment what it can, but these values, as they are written."""
    return as_dataclass(ClusterConfig, {**_LOCAL, "nodes": None, "max_restarts": None, **values})


SILENT = cluster_with()


def found(environment: dict[str, str], **cluster: Any) -> Rendezvous:
    return rendezvous_of(cluster_with(**cluster), environment)
