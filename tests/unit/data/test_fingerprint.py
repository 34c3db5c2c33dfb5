"""Each data set is known again as a copy with other times, and is another one when something of it has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_train.data.char_text import CharText
from ddp_train.data.cifar10 import CIFAR10
from ddp_train.data.image_folder import ImageFolder
from ddp_train.data.mnist import MNIST, FashionMNIST
from ddp_train.data.packed_tokens import PackedTokens
from ddp_train.data.padded_tokens import PaddedTokens
from ddp_train.data.synthetic_images import SyntheticImages
from ddp_train.data.tar_shards import TarShards
from ddp_train.data.token_files import TokenFiles
from ddp_train.errors import DataError
from ddp_train.hashing import fingerprint_of
from tests.unit.data_files import write_cifar_binary, write_image_tree, write_mnist, write_shards_of, write_text, write_tokens

DOCUMENTS = [list(range(1, 9)), list(range(20, 40))]


def tokens(root: Path) -> Path:
    return write_tokens(root, {"train": [DOCUMENTS, DOCUMENTS]})


def tars(root: Path) -> Path:
    write_image_tree(root / "tree", size=(8, 8))
    write_shards_of(root / "tree", root, split="train", per_shard=2)
    shutil.rmtree(root / "tree")
    return root


def text(root: Path) -> Path:
    root.mkdir()
    return write_text(root / "text.txt", "to be or not to be, that is the question\n" * 20).parent


def change_last_byte(root: Path, pattern: str) -> None:
    path = sorted(root.rglob(pattern))[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rename_last(root: Path) -> None:
    path = sorted(root.rglob("*.png"))[-1]
    path.rename(path.with_name("renamed.png"))


def grow(root: Path) -> None:
    with (root / "text.txt").open("a") as file:
        file.write("to be\n")


def more_documents(root: Path) -> None:
    shutil.rmtree(root)
    write_tokens(root, {"train": [DOCUMENTS, [*DOCUMENTS, [7]]]})


def swap_tar(root: Path) -> None:
    first, *_, last = sorted(root.glob("*.tar"))
    shutil.copy(first, last)


CASES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], Callable[[Path], None]]] = {
    "char_text": (text, lambda root: CharText(str(root / "text.txt"), context_length=8), grow),
    "image_folder": (lambda root: write_image_tree(root, size=(8, 8)), lambda root: ImageFolder(str(root)), rename_last),
    "tar_shards": (tars, lambda root: TarShards(str(root)), swap_tar),
    "token_files": (tokens, lambda root: TokenFiles(str(root), context_length=4), more_documents),
    "packed_tokens": (tokens, lambda root: PackedTokens(str(root), context_length=8), more_documents),
    "padded_tokens": (tokens, lambda root: PaddedTokens(str(root), context_length=8), more_documents),
    "mnist": (write_mnist, lambda root: MNIST(str(root)), lambda root: change_mnist(root)),
    "cifar10": (write_cifar_binary, lambda root: CIFAR10(str(root)), lambda root: change_last_byte(root, "data_batch_5.bin")),
}


def change_mnist(root: Path) -> None:
    shutil.rmtree(root)
    write_mnist(root, num_train=41)


@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_known_again_and_what_has_changed_is_another(name: str, tmp_path: Path) -> None:
    write, data_of, change = CASES[name]
    write(tmp_path / "first")
    first = data_of(tmp_path / "first")
    assert first.fingerprint and first.meaning
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=shutil.copyfile)
    for path in (tmp_path / "second").rglob("*"):
        os.utime(path, (1, 1))
    second = data_of(tmp_path / "second")
    assert second.fingerprint == first.fingerprint and second.meaning == first.meaning
    change(tmp_path / "second")
    assert data_of(tmp_path / "second").fingerprint != first.fingerprint
    json.dumps([first.fingerprint, first.meaning])  # as a checkpoint holds them


def test_images_that_are_made_are_known_by_their_seed_and_noise() -> None:
    first = SyntheticImages(9).fingerprint
    assert first == SyntheticImages(9).fingerprint
    assert first not in (SyntheticImages(9, seed=1).fingerprint, SyntheticImages(9, noise=0.1).fingerprint)


def test_how_tokens_are_cut_into_shards_is_no_difference_and_their_tokenizer_is(tmp_path: Path) -> None:
    cut = TokenFiles(str(tokens(tmp_path / "cut")), context_length=4)
    whole = TokenFiles(str(write_tokens(tmp_path / "whole", {"train": [DOCUMENTS * 2]})), context_length=4)
    assert cut.fingerprint == whole.fingerprint
    index = tmp_path / "whole/index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "tokenizer": "another"}))
    assert TokenFiles(str(tmp_path / "whole"), context_length=4).meaning["tokenizer"] == "another" != cut.meaning["tokenizer"]


def test_images_kept_in_memory_are_the_same_images(tmp_path: Path) -> None:
    write_image_tree(tmp_path, size=(8, 8))
    assert ImageFolder(str(tmp_path), in_memory=True).fingerprint == ImageFolder(str(tmp_path)).fingerprint


def test_names_of_classes_and_the_scale_of_pixels_are_a_meaning(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    digits, clothes = MNIST(str(tmp_path)).meaning, FashionMNIST(str(tmp_path)).meaning
    assert digits.keys() == clothes.keys() == {"classes", "mean", "std"}
    assert all(digits[name] != clothes[name] for name in digits)


def test_a_text_takes_the_vocabulary_of_a_run_or_names_what_that_lacks(tmp_path: Path) -> None:
    run = CharText(str(write_text(tmp_path / "run.txt", "abcz" * 20)), context_length=8)
    other = CharText(str(write_text(tmp_path / "other.txt", "abz" * 20)), context_length=8)
    assert other.facts["vocab_size"] == 3
    other.use_meaning(run.meaning)
    assert other.facts["vocab_size"] == 4 and other.meaning == run.meaning
    assert other.decode(other.batch(np.arange(1))[0][0]) == "abzabzab"
    foreign = CharText(str(write_text(tmp_path / "foreign.txt", "abc\x01" * 20)), context_length=8)
    with pytest.raises(DataError, match=r"has '\\x01', which the run's vocabulary lacks"):
        foreign.use_meaning(run.meaning)


def test_a_file_is_known_by_its_size_and_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    found = []
    for content in (b"", b"a" * 200_000, b"b" + b"a" * 199_999, b"a" * 199_999 + b"b", b"a" * 200_001):
        path.write_bytes(content)
        found.append(fingerprint_of(path.open("rb")))
    assert all(one != other for place, one in enumerate(found) for other in found[:place])
