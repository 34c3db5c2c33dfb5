import gzip

import numpy as np
import pytest

from ddp_train.data.images.idx import read_idx
from ddp_train.errors import DataError
from tests.unit.data_files import idx_bytes, random_images, write_idx

IMAGES = random_images(5, 1, 4)[:, 0]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_the_content_tells_whether_it_is_compressed_not_the_name(tmp_path, compress, name):
    assert np.array_equal(read_idx(write_idx(tmp_path / name, IMAGES, compress=compress), num_dims=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(IMAGES)[:-1], r"truncated: 95 bytes found\n.*96 bytes.*5 x 4 x 4"),
        (idx_bytes(IMAGES) + b"x", r"too long: 97 bytes found\n.*96 bytes"),
        (idx_bytes(IMAGES)[:9], r"truncated: 9 bytes found\n.*header of 16"),
        (idx_bytes(IMAGES.reshape(5, 16)), r"starts with 00000802\n.*00000803"),
        (b"<html>404</html>", r"starts with 3c68746d"),
        (b"", r"starts with nothing"),
        (gzip.compress(idx_bytes(IMAGES))[:-12], r"corrupt gzip"),
        (gzip.compress(idx_bytes(IMAGES))[:20] + b"\xff" * 30, r"corrupt gzip"),
        (gzip.compress(idx_bytes(IMAGES)[:-1]), r"truncated: 95 bytes found"),
    ],
    ids=[
        "short",
        "long",
        "half a header",
        "other dimensions",
        "a web page",
        "empty",
        "half a gzip",
        "gzip with noise",
        "short inside gzip",
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, num_dims=3)
    assert caught.value.key == "data.root"
    assert str(path) in caught.value.happened


def test_a_header_of_a_petabyte_allocates_nothing(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(b"\x00\x00\x08\x03" + b"\xff" * 12 + b"\x00" * 100)
    with pytest.raises(DataError, match="truncated"):
        read_idx(path, num_dims=3)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing-here.*No such file"):
        read_idx(tmp_path / "nothing-here", num_dims=1)
