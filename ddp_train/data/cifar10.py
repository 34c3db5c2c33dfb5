"""CIFAR-10 from its official files, the binary version or the Python one; the binary one is downloaded when both are missing.

Source: Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ddp_train.data.download import damaged, ensure_unpacked
from ddp_train.data.images.image_array import ImageArray, require_labels

_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_BINARY_FOLDER, _PYTHON_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
_PIXELS = 3 * 32 * 32  # the red plane, the green one, the blue one, each row by row
_RECORD_BYTES = 1 + _PIXELS

Batch = tuple[NDArray[np.uint8], NDArray[np.integer[Any]]]  # one file: pixels [N, 3072] and labels [N]


class CIFAR10(ImageArray):
    """Photographs of ten kinds of things: 50,000 for training, 10,000 for testing, 3 x 32 x 32.

    Args:
        root: folder with the official files, or with cifar-10-batches-bin or cifar-10-batches-py in it.
        split: "train" or "test".
        crop_padding, crop_fill, flip: as for `ImageArray`.
    """

    downloads = True
    address: ClassVar[str] = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    sha256: ClassVar[str] = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

    def __init__(
        self,
        root: str,
        split: Literal["train", "test"] = "train",
        *,
        crop_padding: int = 0,
        crop_fill: Literal["black", "reflect"] = "black",
        flip: bool = False,
    ) -> None:
        names, folder = _BATCHES[split], Path(root)
        binary, python = (".bin", _parse_binary), ("", _parse_python)
        layouts = [(folder, *binary), (folder / _BINARY_FOLDER, *binary), (folder, *python), (folder / _PYTHON_FOLDER, *python)]
        layout = next((layout for layout in layouts if any((layout[0] / (name + layout[1])).is_file() for name in names)), None)
        if layout is None:
            ensure_unpacked(self.address, self.sha256, folder, member=_BINARY_FOLDER)
        folder, suffix, parse = layout or layouts[1]
        batches = [_read(folder / (name + suffix), parse) for name in names]
        pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        images = pixels.reshape(-1, 3, 32, 32)
        super().__init__(images, labels, num_classes=10, mean=mean, std=std, crop_padding=crop_padding, crop_fill=crop_fill, flip=flip)


def _parse_binary(path: Path, content: bytes) -> Batch:
    if len(content) % _RECORD_BYTES:
        raise damaged(path, f"has {len(content)} bytes", f"a multiple of {_RECORD_BYTES}: a label and 3 x 32 x 32 pixels per record")
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    return records[:, 1:], records[:, 0]


def _parse_python(path: Path, content: bytes) -> Batch:
    try:
        entries = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()  # bytes: Python 2 wrote the official files
        by_name = {key.decode() if isinstance(key, bytes) else key: value for key, value in entries.items()}
        pixels, labels = by_name["data"], np.asarray(by_name["labels"]).astype(np.int64, casting="safe")
        if pixels.dtype != np.uint8 or pixels.shape != (labels.size, _PIXELS) or labels.ndim != 1:
            raise ValueError(f"data is {pixels.dtype} {pixels.shape}, labels are {labels.shape}")
    except Exception as error:  # a damaged pickle raises nearly anything
        expected = f"a pickle of data, uint8 [N, {_PIXELS}], and labels, whole numbers [N], and nothing else"
        raise damaged(path, f"cannot be read: {type(error).__name__}: {error}", expected) from error
    return pixels, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and plain containers; refuses every other name, so that a file of others executes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        # The private module moved in numpy 2; the arrays' own reduction gives the function, wherever it lives.
        if (module, name) in {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}:
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")


def _read(path: Path, parse: Callable[[Path, bytes], Batch]) -> Batch:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}", "all files of the split in one folder") from error
    pixels, labels = parse(path, content)
    require_labels(path, labels, num_images=len(pixels))
    return pixels, labels
