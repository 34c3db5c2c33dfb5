"""MNIST and Fashion-MNIST from their official IDX files, downloaded when they are missing."""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ddp_train.data.download import damaged, ensure
from ddp_train.data.images.image_array import ImageArray, require_labels

_PREFIXES = {"train": "train", "test": "t10k"}
_FOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")  # the last three: how torchvision lays them out
_GZIP_MAGIC = b"\x1f\x8b"
_UINT8 = 0x08


class MNIST(ImageArray):
    """Handwritten digits: 60,000 for training, 10,000 for testing, 1 x 28 x 28.

    Args:
        root: folder with the four official files, gzip-compressed or not; the missing ones are downloaded into it.
        split: "train" or "test".
        crop_padding, flip: as for `ImageArray`.

    Source: LeCun, Cortes, Burges; the mirror is the one that torchvision uses.
    """

    downloads = True
    address: ClassVar[str] = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    sha256: ClassVar[Mapping[str, str]] = {
        "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    }
    classes: ClassVar[Sequence[str]] = tuple("0123456789")
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081

    def __init__(self, root: str, split: Literal["train", "test"] = "train", *, crop_padding: int = 0, flip: bool = False) -> None:
        folder, names = Path(root), [f"{_PREFIXES[split]}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        ensure({f"{name}.gz": self.sha256[name] for name in names if not _find(folder, name)}, self.address, folder)
        images_path, labels_path = (path for name in names if (path := _find(folder, name)))
        images, labels = read_idx(images_path, num_dims=3), read_idx(labels_path, num_dims=1)
        require_labels(labels_path, labels, num_images=len(images))
        super().__init__(images[:, None], labels, num_classes=10, mean=[self.mean], std=[self.std], crop_padding=crop_padding, flip=flip)


class FashionMNIST(MNIST):
    """Clothes in MNIST's format: 60,000 for training, 10,000 for testing, 1 x 28 x 28. Source: Xiao et al. 2017, arXiv:1708.07747."""

    address: ClassVar[str] = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    sha256: ClassVar[Mapping[str, str]] = {
        "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    }
    classes: ClassVar[Sequence[str]] = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530


def read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes in an IDX file, gzip-compressed or not (its first bytes tell, not its name).

    Such a file is a magic number, the sizes, then the bytes. Source: http://yann.lecun.com/exdb/mnist/

    Raises DataError: unreadable, another format, or not exactly as long as its header says.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be read: {error}", "a complete file") from error
    magic = struct.pack(">HBB", 0, _UINT8, num_dims)
    if content[:4] != magic:
        expected = f"{magic.hex()}: IDX, unsigned bytes, {num_dims} dimension(s)"
        raise damaged(path, f"starts with {content[:4].hex() or 'nothing'}", expected)
    header_length = 4 + 4 * num_dims
    shape = struct.unpack(f">{num_dims}I", content[4:header_length].ljust(4 * num_dims, b"\0"))
    expected_length = header_length + math.prod(shape)
    if len(content) != expected_length:
        size = " x ".join(map(str, shape))
        raise damaged(path, f"has {len(content)} bytes", f"{expected_length}, as its header says ({size})")
    return np.frombuffer(content, np.uint8, offset=header_length).reshape(shape)


def _find(root: Path, name: str) -> Path | None:
    candidates = [root / folder / (name + suffix) for folder in _FOLDERS for suffix in ("", ".gz")]
    return next((path for path in candidates if path.is_file()), None)
