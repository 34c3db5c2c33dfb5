"""What machines tell, made up."""

from __future__ import annotations

from typing import Any

from ddp_train.launch.node_facts.facts import NodeFacts
from ddp_train.launch.node_facts.file_list import FileList

HASHES = {"ddp_train/errors.py": "1" * 16, "mine.py": "2" * 16}
DATA = FileList(sizes={"a.bin": 10, "b": -1, "b/c.bin": 20}, hashes={"a.bin": "3" * 16, "b/c.bin": "4" * 16}, is_whole=True)


def facts(host: str = "node0", **changes: Any) -> NodeFacts:
    """Return what a healthy machine of two tells."""
    told: dict[str, Any] = {
        "launch_id": "l1",
        "node_rank": 0,
        "nodes": "2",
        "processes": 2,
        "uid": 1000,
        "utc": 1000.0,
        "spec": "",
        "config": {"optimizer.lr": 0.1, "cluster.node_rank": 0, "cluster.nodes": 2},
        "source": FileList(sizes={}, hashes=HASHES, listed_by="git", is_whole=True),
        "data": {"data.root": DATA},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "ddp_train": "1"},
        "device": "cpu",
        "device_count": 4,
        "driver": "",
    }
    return NodeFacts(host=host, **(told | changes))
