"""`ddp-train prepare tokens`: nothing is lost, whatever the size of the parts that are encoded at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from numpy.typing import NDArray

from ddp_train.cli import main as app
from ddp_train.data.tokens.token_shards import TokenDocuments
from tests.conftest import Project
from tests.fake_runner import FakeRunner
from tests.unit.data_files import TEXT

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
MERGES = [b"\n\n", b"  ", b" t", b"th", b"he", b" th", b" the", b",\n", b".\n", b" \n", b"in", b"\r\n", "é".encode(), "你".encode()[:2]]


def tiny_encoding(pattern: str = GPT2_PATTERN, *, end_of_text: int | None = None) -> tiktoken.Encoding:
    ranks = {bytes([byte]): byte for byte in range(256)} | {merge: 256 + number for number, merge in enumerate(MERGES)}
    special = {"<|endoftext|>": end_of_text or len(ranks)}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def documents(root: Path, split: str) -> list[NDArray[np.unsignedinteger]]:
    found = TokenDocuments(root, split)
    return [found.read(index) for index in range(len(found))]


def texts(root: Path, split: str) -> list[bytes]:
    """Return the texts of a split that was prepared byte by byte."""
    assert all(document[-1] == 256 for document in documents(root, split))
    return [document[:-1].astype(np.uint8).tobytes() for document in documents(root, split)]


def write_jsonl(path: Path, found: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in found))
    return path


def prepare_words(words: list[str]) -> int:
    """Type `ddp-train prepare WORDS`, and return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ddp-train", "prepare", *words])
        return app.run(sys.argv[1:], FakeRunner())


def made(*arguments: object) -> None:
    assert prepare_words(["tokens", *map(str, arguments)]) == 0


def test_a_large_vocabulary_makes_uint32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny_encoding(end_of_text=70_000))
    path = write_jsonl(tmp_path / "a.jsonl", ["the", "in"])
    made(path, f"to={tmp_path / 'tokens'}", "tokenizer=tiktoken:tiny", "val_fraction=0.5")
    index = json.loads((tmp_path / "tokens" / "index.json").read_text())
    assert (index["dtype"], index["vocab_size"], index["end_of_text"]) == ("uint32", 70_001, 70_000)
    assert [document.tolist() for document in documents(tmp_path / "tokens", "val")] == [[266, 70_000]]
    found = TokenDocuments(tmp_path / "tokens")
    assert found.index.bytes_per_token == pytest.approx(5 / 5)  # the + end, in + end: 2 + 1 + 1 + 1 tokens


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', [], "a.jsonl, line 2 is not a document: KeyError"),
        ('{"text": "a"}\nb\n', [], "a.jsonl, line 2 is not a document: JSONDecodeError"),
        ('{"text": 1}\n', [], "a.jsonl, line 1 is not a document"),
        ('{"text": ""}\n', [], "there is no text in these files"),
        ('{"text": "a"}\n' * 5, ["val_fraction=0.1"], "0.1 of 5 documents is less than one"),
        ('{"text": "a"}\n', ["val_fraction=1"], "val_fraction: is 1"),
        ('{"text": "a"}\n', ["shard_tokens=many"], "shard_tokens: 'many' is not a number"),
        ('{"text": "a"}\n', ["tokenizer=bytes"], "there is no tokenizer 'bytes'"),
        ('{"text": "a"}\n', ["tokeniser=byte"], "there is no file tokeniser=byte"),
        ('{"text": "a"}\n', ["b.txt"], "there is no file b.txt"),
    ],
)
def test_what_cannot_be_prepared_is_said_and_leaves_nothing(
    tmp_path: Path, content: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    assert prepare_words(["tokens", str(tmp_path / "a.jsonl"), f"to={tmp_path / 'tokens'}", *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("tokens/*"))


def test_a_missing_network_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    (tmp_path / "a.txt").write_text(TEXT)
    assert prepare_words(["tokens", str(tmp_path / "a.txt"), f"to={tmp_path / 'tokens'}", "tokenizer=tiktoken:gpt2"]) == 2
    assert "cannot fetch the vocabulary of gpt2: ConnectionError: no route to host" in (said := capsys.readouterr().err)
    assert "TIKTOKEN_CACHE_DIR" in said


def test_an_attempt_that_was_killed_is_done_again_and_a_complete_folder_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    root = tmp_path / "tokens"
    root.mkdir()
    for name in ("train_00007.bin", "train_00007.starts.npy", "train_00008.bin", "notes.md"):
        (root / name).write_text("from before")
    made(tmp_path / "a.txt", f"to={root}", "val_fraction=0.1")
    assert sorted(path.name for path in root.iterdir()) == [
        "index.json",
        "notes.md",
        *(f"{split}_00000{suffix}" for split in ("train", "val") for suffix in (".bin", ".starts.npy")),
    ]
    before = (root / "index.json").read_bytes()
    assert prepare_words(["tokens", str(tmp_path / "a.txt"), f"to={root}", "val_fraction=0.5"]) == 2
    assert "has an index.json already" in capsys.readouterr().err
    assert (root / "index.json").read_bytes() == before


def test_the_real_command_says_what_it_made_and_what_to_type_next(project: Project) -> None:
    write_jsonl(project.folder / "date=1.jsonl", ["Hello"] * 99 + ["Hello world"])
    done = project.run("prepare", "tokens", "date=1.jsonl", "to=data/tokens")
    assert done.returncode == 0, done.output
    assert "train    594 tokens, 99 documents, 1 file" in done.stdout
    assert "val      12 tokens, 1 document, 1 file" in done.stdout
    assert "bytes    0.835 per token" in done.stdout
    assert "ddp-train data=token_files data.root=data/tokens model=gpt objective=language_modeling" in done.stdout
