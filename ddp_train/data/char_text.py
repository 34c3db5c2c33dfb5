"""A text file as sequences of characters, for small language models.

Shapes: B samples, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from ddp_train.errors import DataError
from ddp_train.hashing import fingerprint_of
from ddp_train.interfaces import DataSource, Indices

_CHUNK_BYTES = 1 << 22


class CharText(DataSource):
    """Windows of `context_length` tokens; a token is one byte, which in ASCII text is a character.

    The vocabulary is the bytes that occur anywhere in the file, in order, or those of the run (`use_meaning`). The file is mapped, not
    loaded. As in nanoGPT, the split "train" is the file's first part and "val" its last `val_fraction`.

    Args:
        path: any text file.
        split: "train" or "val".
        context_length: T.
        stride: tokens from one window's start to the next; 1 is every window, `context_length` is every token once.
        val_fraction: of the file, between 0 and 1.
    """

    gives_pairs = True
    argument_ranges: ClassVar = {"context_length": {"min": 1}, "stride": {"min": 1}, "val_fraction": {"above": 0, "below": 1}}

    def __init__(
        self,
        path: str,
        split: Literal["train", "val"] = "train",
        *,
        context_length: int = 64,
        stride: int = 1,
        val_fraction: float = 0.1,
    ) -> None:
        self._path, self._context_length, self._stride = Path(path), context_length, stride
        text = _map_bytes(self._path)
        val_start = int(len(text) * (1 - val_fraction))
        self._start, self._end = {"train": (0, val_start), "val": (val_start, len(text))}[split]
        if self._end - self._start < context_length + 1:
            happened = f"the {split} split of {path} has {self._end - self._start} of the file's {len(text)} bytes"
            expected = f"at least {context_length + 1}: a window of data.context_length={context_length} and the token after it"
            raise DataError(key="data.path", happened=happened, expected=expected, fix="a longer file, or a shorter data.context_length")
        self._use(np.flatnonzero(_count_bytes(text)).astype(np.uint8))

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab_size": len(self._vocabulary), "context_length": self._context_length, "bytes_per_token": 1.0}

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return fingerprint_of(self._path.open("rb"))

    @property
    def meaning(self) -> Mapping[str, Any]:
        return {"vocabulary": self._vocabulary.tobytes().decode("latin-1")}

    def use_meaning(self, meaning: Mapping[str, Any]) -> None:
        if "vocabulary" not in meaning:
            return
        vocabulary = np.frombuffer(meaning["vocabulary"].encode("latin-1"), np.uint8)
        if (unknown := np.setdiff1d(self._vocabulary, vocabulary)).size:
            happened = f"{self._path} has {', '.join(map(repr, unknown.tobytes().decode('latin-1')))}, which the run's vocabulary lacks"
            expected = f"the {len(vocabulary)} characters that the model knows"
            raise DataError(key="data.path", happened=happened, expected=expected, fix="replace or remove the others")
        self._use(vocabulary)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [B, T] and targets [B, T], int64; window i starts at i * `stride`."""
        windows = self._windows[indices]
        tokens_BT = self._token_of_byte[windows[:, :-1]]
        targets_BT = self._token_of_byte[windows[:, 1:]]
        return torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT)

    def decode(self, tokens: ArrayLike) -> str:
        text: bytes = self._vocabulary[np.asarray(tokens)].tobytes()
        return text.decode("utf-8", errors="replace")

    def _use(self, vocabulary: NDArray[np.uint8]) -> None:
        self._vocabulary = vocabulary
        self._token_of_byte = np.zeros(256, np.int64)
        self._token_of_byte[vocabulary] = np.arange(len(vocabulary))

    @cached_property
    def _windows(self) -> NDArray[np.uint8]:
        text = _map_bytes(self._path)[self._start : self._end]
        return sliding_window_view(text, self._context_length + 1)[:: self._stride]

    def __getstate__(self) -> dict[str, Any]:
        # For data-loader workers that are started afresh: pickling a view would copy the whole text, once per position in a window.
        return {name: value for name, value in self.__dict__.items() if name != "_windows"}


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    try:
        return np.asarray(np.memmap(path, np.uint8, mode="r"))  # a plain view: the subclass makes every access slower
    except OSError as error:
        what = f"{path.absolute()} cannot be read: {error.strerror}"
    except ValueError:  # nothing to map
        what = f"{path.absolute()} is empty"
    raise DataError(key="data.path", happened=what, expected="a text file", fix="data.path=FILE, relative to your current folder")


def _count_bytes(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    counts = np.zeros(256, np.int64)
    for start in range(0, len(text), _CHUNK_BYTES):  # bincount widens its input eightfold
        counts += np.bincount(text[start : start + _CHUNK_BYTES], minlength=256)
    return counts
