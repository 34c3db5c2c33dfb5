"""What is on the disk: other programs read it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_train.checkpoint.manifest import CheckpointError, Manifest
from tests.unit.parts import LOSS, manifest

ON_DISK = """{
  "format": 6,
  "torch": "2.10",
  "step": 4,
  "world_size": 1,
  "run": "1111",
  "config_sha256": "abc",
  "facts": {
    "metrics": {
      "eval/loss": 0.5
    },
    "ranked_by": {
      "metric": "eval/loss",
      "goal": "min"
    }
  },
  "files": {
    "rank_00000.safetensors": {
      "bytes": 8,
      "xxh3_128": "ab"
    }
  }
}
"""


def test_its_form_on_the_disk_stays() -> None:
    own = manifest(4, run="1111", metrics={"eval/loss": 0.5}, ranked_by=LOSS)
    assert own.to_bytes().decode() == ON_DISK
    assert Manifest.from_bytes(own.to_bytes()) == own


def test_what_is_not_known_may_be_missing() -> None:
    content = json.loads(ON_DISK) | {"facts": {}}
    del content["run"]
    assert Manifest.from_bytes(json.dumps(content).encode()) == manifest(4)


@pytest.mark.parametrize(
    "change", [{"facts": {"ranked_by": 3}}, {"facts": {"metrics": 3}}, {"facts": None}, {"step": "4"}, {"files": {}}, {"format": 2}]
)
def test_a_forged_one_is_refused(change: dict[str, Any]) -> None:
    for text in (json.dumps(json.loads(ON_DISK) | change), "[1]", "[" * 100_000):
        with pytest.raises(CheckpointError, match="manifest"):
            Manifest.from_bytes(text.encode())
