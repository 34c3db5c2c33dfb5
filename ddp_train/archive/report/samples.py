"""Images and texts that callbacks have shown, by step: from TensorBoard's files, the only ones that hold them."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddp_train.archive.archived_run import ArchivedRun

_HEAD = struct.Struct("<QI")  # of a record: bytes of its content, their checksum; another checksum comes after the content
_CONFIG = ("config", "_hparams_")  # what every run writes


class _Place(NamedTuple):
    """Where an image or a text is: all of a run do not fit into memory."""

    path: Path
    begin: int  # of its record
    length: int
    size: int  # as text


def samples_of(run: ArchivedRun, *, max_bytes: int) -> list[dict[str, Any]]:
    """Return what a run's callbacks have shown: for each name its steps, and an image or a text for each.

    Steps are left out evenly until all is within `max_bytes`; the first and the last one stay.
    """
    if not run.config.get("callbacks"):
        return []
    try:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    except ImportError:
        return []

    def values(content: bytes) -> Iterator[tuple[str, int, str]]:
        """Yield the name, step and content of each image and text of a record."""
        event = Event.FromString(content)
        for value in event.summary.value:
            if value.tag.startswith(_CONFIG):
                continue
            if value.HasField("image"):
                yield value.tag, event.step, "data:image/png;base64," + base64.b64encode(value.image.encoded_image_string).decode()
            elif value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
                yield value.tag.removesuffix("/text_summary"), event.step, value.tensor.string_val[0].decode(errors="replace")

    def read(name: str, step: int, place: _Place) -> str:
        with place.path.open("rb") as file:
            file.seek(place.begin)
            return next(text for *of, text in values(file.read(place.length)) if of == [name, step])

    places: dict[str, dict[int, _Place]] = {}
    for path in sorted(run.root.glob("tensorboard/**/events.out.tfevents.*")):
        for begin, content in _records(path):
            if b"PNG" in content or b"\x0a\x04text" in content:
                with suppress(DecodeError):  # damaged
                    for name, step, text in values(content):
                        places.setdefault(name, {})[step] = _Place(path, begin, len(content), len(text))
    shown = []
    for name, by_step in sorted(places.items()):
        entries = [{"step": step, "value": read(name, step, by_step[step])} for step in _kept(by_step, max_bytes // len(places))]
        shown.append({"name": name, "of": len(by_step), "shown": entries})
    return shown


def _kept(by_step: dict[int, _Place], max_bytes: int) -> list[int]:
    steps = sorted(by_step)
    for number in range(min(len(steps), 24), 0, -1):
        kept = [steps[row] for row in np.unique(np.linspace(len(steps) - 1, 0, number).round().astype(int))]
        if sum(by_step[step].size for step in kept) <= max_bytes:
            break
    return [step for step in kept if by_step[step].size <= max_bytes]


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where the content of each whole record of a file of TensorBoard's begins, and the content: TFRecord framing."""
    with suppress(OSError), path.open("rb") as file:
        size = path.stat().st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            begin, length = file.tell(), _HEAD.unpack(head)[0]
            if begin + length + 4 > size:  # a kill leaves half a record
                return
            yield begin, file.read(length)
            file.seek(4, os.SEEK_CUR)
