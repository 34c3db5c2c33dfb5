"""Clusters whose environment is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from ddp_train.config.check import CONF
from ddp_train.config.cluster import Rendezvous, rendezvous_of
from ddp_train.config.schema import ClusterConfig

SILENT = ClusterConfig(**{**yaml.safe_load((CONF / "cluster/local.yaml").read_text()), "nodes": None, "max_restarts": None})
"""A section that leaves to the environment what it can."""


def found(environment: dict[str, str], **cluster: Any) -> Rendezvous:
    return rendezvous_of(replace(SILENT, **cluster), environment)
