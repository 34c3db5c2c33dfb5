"""Documents of a corpus: nothing is lost, whatever the size of the parts that are encoded at a time."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from ddp_train.data.tokens import corpus
from ddp_train.data.tokens.token_writer import TiktokenTokenizer
from tests.unit.cli.test_prepare import CL100K_PATTERN, GPT2_PATTERN, documents, made, prepare_words, texts, tiny_encoding, write_jsonl
from tests.unit.data_files import TEXT


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """Have tiktoken find an encoding of few tokens, without a network."""
    encoding = tiny_encoding()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return encoding


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_text_is_one_document_and_its_end_is_val(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_BLOCK_BYTES", 100)
    content = (TEXT + "é no line end").encode() + b"\xff\x00"
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    made(path, f"to={tmp_path / 'tokens'}", "val_fraction=0.1")
    (train,), (val,) = texts(tmp_path / "tokens", "train"), texts(tmp_path / "tokens", "val")
    assert train + val == content
    assert train.endswith(b"\n")
    assert 0.05 < len(val) / len(content) <= 0.1


def test_lines_of_json_are_documents_and_val_gets_its_fraction_evenly(tmp_path: Path) -> None:
    found = [f"document {number} é 你" for number in range(25)]
    write_jsonl(tmp_path / "b.jsonl", found[10:])
    with open(write_jsonl(tmp_path / "a.jsonl", found[:10]), "a") as file:
        file.write("\n")
    made(tmp_path / "a.jsonl", tmp_path / "b.jsonl", f"to={tmp_path / 'tokens'}", "val_fraction=0.2", "shard_tokens=60")
    train, val = ([text.decode() for text in texts(tmp_path / "tokens", split)] for split in ("train", "val"))
    assert val == found[4::5]
    assert train == [text for number, text in enumerate(found) if number % 5 != 4]
    assert len(list((tmp_path / "tokens").glob("train_*.bin"))) > 3


def test_a_folder_stands_for_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/3.txt", "a/1.txt", "a/readme.md"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    made(tmp_path / "in", f"to={tmp_path / 'tokens'}", "val_fraction=0")
    assert texts(tmp_path / "tokens", "train") == [b"a/1.txt", b"a/3.txt", b"b/2.txt"]
    assert texts(tmp_path / "tokens", "val") == []


def test_empty_documents_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "", "b"])
    made(path, tmp_path / "empty.txt", f"to={tmp_path / 'tokens'}", "val_fraction=0")
    assert texts(tmp_path / "tokens", "train") == [b"a", b"b"]
    assert "2 empty documents left out" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, CL100K_PATTERN])
def test_a_long_text_has_the_same_tokens_in_parts_as_in_one(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = tiny_encoding(pattern)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    pieces = ["the", " the", "\n", "\n\n", "\r\n", ",", ".", "'s", "  ", " ", "你好", "é", "12", "/", "<|endoftext|>", "\u3000", "e\u0301"]
    random = np.random.default_rng(0)
    text = "".join(random.choice(pieces, 4000))
    monkeypatch.setattr(corpus, "_BLOCK_BYTES", 64)
    monkeypatch.setattr("ddp_train.data.tokens.token_writer._SEARCH_BYTES", 32)
    (tmp_path / "a.txt").write_bytes(text.encode())
    made(tmp_path / "a.txt", f"to={tmp_path / 'tokens'}", "tokenizer=tiktoken:tiny", "val_fraction=0")
    (document,) = documents(tmp_path / "tokens", "train")
    assert document.tolist() == [*encoding.encode_ordinary(text), encoding.eot_token]
    cuts = TiktokenTokenizer("tiny").cut(text.encode())
    assert 0 < cuts < len(text.encode())


def test_text_that_is_not_utf_8_is_named_where_the_tokenizer_needs_it(
    tmp_path: Path, tiny: tiktoken.Encoding, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes("über".encode("latin1") * 10)
    assert prepare_words(["tokens", str(tmp_path / "a.txt"), f"to={tmp_path / 'tokens'}", "tokenizer=tiktoken:tiny", "val_fraction=0"]) == 2
    assert "a.txt is not UTF-8" in capsys.readouterr().err


@pytest.mark.data
def test_real_text_survives(tmp_path: Path, data_folder: Callable[[str], Path]) -> None:
    path = data_folder("text/tinyshakespeare.txt")
    made(path, f"to={tmp_path / 'tokens'}")
    assert texts(tmp_path / "tokens", "train")[0] + texts(tmp_path / "tokens", "val")[0] == path.read_bytes()
