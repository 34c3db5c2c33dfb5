"""The files of checkpoints: in safetensors' layout, and believed in nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.tensor_file import TensorFileError

TENSORS = {"a": torch.rand(3, 5), "b": torch.arange(7, dtype=torch.int16), "c": torch.tensor([True, False])}


def written(path: Path) -> str:
    header = tensor_file.make_header([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()])
    values = b"".join(tensor.numpy().tobytes() for tensor in TENSORS.values())
    return tensor_file.write(path, (memoryview(header), memoryview(values)))


def read(path: Path) -> dict[str, torch.Tensor]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return tensor_file.read(descriptor, path.name)
    finally:
        os.close(descriptor)


def test_the_files_are_safetensors_to_other_programs_too(tmp_path: Path) -> None:
    digest = written(tmp_path / "ours")
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs")
    assert digest == xxhash.xxh3_128_hexdigest((tmp_path / "ours").read_bytes())
    for found in (safetensors.torch.load_file(tmp_path / "ours"), read(tmp_path / "ours"), read(tmp_path / "theirs")):
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        written(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "type": lambda header: header["a"].update(dtype="PICKLE"),
    "negative": lambda header: header["a"].update(shape=[-3, -5]),
    "huge": lambda header: header["a"].update(shape=[1 << 61, 1 << 61]),
    "overlap": lambda header: header["b"].update(data_offsets=[0, 14]),
    "gap": lambda header: header["c"].update(data_offsets=[75, 77]),
    "outside": lambda header: header["c"].update(data_offsets=[74, 1 << 40]),
    "backwards": lambda header: header["a"].update(data_offsets=[60, 0]),
    "too short": lambda header: header.pop("c"),
    "fraction": lambda header: header["a"].update(data_offsets=[0.0, 60.0]),
    "no tensor": lambda header: header.update(d=[1]),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_cannot_be_true_is_refused(tmp_path: Path, change: str) -> None:
    written(tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    HEADERS[change](header)
    text = json.dumps(header).encode()
    (tmp_path / "bad").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(TensorFileError, match="bad"):
        read(tmp_path / "bad")


@pytest.mark.parametrize(
    "content",
    [b"", b"1234", (1 << 62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a":1,"a"'],
)
def test_no_header_is_refused_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(TensorFileError, match="bad"):
        read(tmp_path / "bad")


def test_more_tensors_than_the_reader_takes_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_MAX_HEADER", 200)
    few = [("a", torch.float32, (2,))]
    assert tensor_file.make_header(few)
    with pytest.raises(TensorFileError, match=r"10 tensors need a header of \d+ bytes"):
        tensor_file.make_header([(f"a{number}", torch.float32, (2,)) for number in range(10)])


def test_names_that_come_twice_and_endless_nesting_are_refused(tmp_path: Path) -> None:
    for text in (b'{"a": 1, "a": 2}', b"[" * 100_000):
        (tmp_path / "bad").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(TensorFileError, match="header cannot be read"):
            read(tmp_path / "bad")
