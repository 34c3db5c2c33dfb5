"""Images and texts that callbacks have shown, by step: from TensorBoard's files, the only ones that hold them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddp_train.archive.archived_run import ArchivedRun

_HEAD = struct.Struct("<QI")  # of a record: bytes of its content, their checksum; another checksum comes after the content
_CONFIG = ("config", "_hparams_")  # what every run writes


def samples_of(run: ArchivedRun, *, max_bytes: int) -> list[dict[str, Any]]:
    """Return what a run's callbacks have shown: for each name its steps, and an image or a text for each.

    Steps are left out evenly until all is within `max_bytes`; the first and the last one stay.
    """
    if not run.config.get("callbacks"):
        return []
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    except ImportError:
        return []
    shown: dict[str, dict[int, str]] = {}
    for path in sorted(run.root.glob("tensorboard/**/events.out.tfevents.*")):
        for content in _records(path):
            if b"PNG" not in content and b"\x0a\x04text" not in content:
                continue
            event = Event.FromString(content)
            for value in event.summary.value:
                if value.tag.startswith(_CONFIG):
                    continue
                if value.HasField("image"):
                    image = "data:image/png;base64," + base64.b64encode(value.image.encoded_image_string).decode()
                    shown.setdefault(value.tag, {})[event.step] = image
                elif value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
                    text = value.tensor.string_val[0].decode(errors="replace")
                    shown.setdefault(value.tag.removesuffix("/text_summary"), {})[event.step] = text
    return [_thinned(name, by_step, max_bytes // len(shown)) for name, by_step in sorted(shown.items())]


def _thinned(name: str, by_step: dict[int, str], max_bytes: int) -> dict[str, Any]:
    steps = sorted(by_step)
    for number in range(min(len(steps), 24), 0, -1):
        kept = [steps[row] for row in np.unique(np.linspace(len(steps) - 1, 0, number).round().astype(int))]
        if sum(len(by_step[step]) for step in kept) <= max_bytes:
            break
    shown = [{"step": step, "value": by_step[step]} for step in kept if len(by_step[step]) <= max_bytes]
    return {"name": name, "of": len(steps), "shown": shown}


def _records(path: Path) -> Iterator[bytes]:
    """Yield the content of each whole record of a file of TensorBoard's: TFRecord framing."""
    try:
        content = path.read_bytes()
    except OSError:
        return
    position = 0
    while position + _HEAD.size <= len(content):
        length, _ = _HEAD.unpack_from(content, position)
        begin = position + _HEAD.size
        if begin + length + 4 > len(content):  # a kill leaves half a record
            return
        yield content[begin : begin + length]
        position = begin + length + 4
