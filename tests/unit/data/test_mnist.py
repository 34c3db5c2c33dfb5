import gzip
import socket
import time

import numpy as np
import pytest
import torch

from ddp_train.data.mnist import MNIST, FashionMNIST, read_idx
from ddp_train.errors import DataError
from tests.unit.data_files import idx_bytes, random_images, serve, sha256, write_idx, write_mnist

IMAGES = random_images(5, 1, 4)[:, 0]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def closed_port():
    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("folder", ["", "raw", "MNIST/raw"])
@pytest.mark.parametrize("compress", [False, True])
def test_the_official_files_are_found_in_each_layout(tmp_path, folder, compress):
    write_mnist(tmp_path / folder, compress=compress)
    train, test = MNIST(str(tmp_path)), MNIST(str(tmp_path), "test")
    assert (len(train), len(test)) == (40, 20)
    assert train.facts == {"image_shape": (1, 28, 28), "num_classes": 10}
    images, labels = test.batch(np.asarray([3, 15]))
    np.testing.assert_allclose(images.numpy(), (random_images(20, 1, 28, seed=20)[[3, 15]] / 255 - 0.1307) / 0.3081, atol=1e-5)
    assert labels.tolist() == [3, 5]


def test_fashion_mnist_has_its_own_normalisation(tmp_path):
    write_mnist(tmp_path)
    images, _ = FashionMNIST(str(tmp_path), "test").batch(np.arange(20))
    np.testing.assert_allclose(images.numpy(), (random_images(20, 1, 28, seed=20) / 255 - 0.2860) / 0.3530, atol=1e-5)


def test_crops_and_flips_are_offered(tmp_path):
    write_mnist(tmp_path)
    data = MNIST(str(tmp_path), crop_padding=2, flip=True)
    batch = data.batch(np.arange(40))
    changed, labels = data.augment(batch, np.arange(40, dtype=np.uint64), np.arange(40))
    assert not torch.equal(changed, batch[0])
    assert torch.equal(labels, batch[1])


def test_different_numbers_of_images_and_labels_are_refused(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(39, np.uint8), compress=True)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz has 39 labels\n.*one for each image \(40\)"):
        MNIST(str(tmp_path))


def test_a_label_above_nine_is_refused(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.full(40, 10, np.uint8), compress=True)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz has labels from 10 to 10"):
        MNIST(str(tmp_path))


def test_missing_files_are_downloaded_once(tmp_path):
    published = write_mnist(tmp_path / "published")
    with serve(published) as server:

        class Served(MNIST):
            address = server
            sha256 = {path.name.removesuffix(".gz"): sha256(path) for path in published.iterdir()}  # noqa: RUF012

        assert len(Served(str(tmp_path / "data" / "mnist"))) == 40
    assert sorted(path.name for path in (tmp_path / "data" / "mnist").iterdir()) == [
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
    ]
    assert len(Served(str(tmp_path / "data" / "mnist"))) == 40  # the server is gone


def test_without_a_network_the_message_says_which_files_to_put_where(tmp_path, closed_port):
    class Unreachable(MNIST):
        address = f"http://127.0.0.1:{closed_port}/"

    started = time.perf_counter()
    with pytest.raises(DataError) as caught:
        Unreachable(str(tmp_path / "mnist"), "test")
    assert time.perf_counter() - started < 12
    assert caught.value.key == "data.root"
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        assert name in caught.value.happened
        assert f"http://127.0.0.1:{closed_port}/{name}" in caught.value.fix
    assert str(tmp_path / "mnist") in caught.value.fix
    assert "refused" in caught.value.happened
    assert not (tmp_path / "mnist").exists()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_the_content_tells_whether_it_is_compressed_not_the_name(tmp_path, compress, name):
    assert np.array_equal(read_idx(write_idx(tmp_path / name, IMAGES, compress=compress), num_dims=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(IMAGES)[:-1], r"has 95 bytes\n.*96, .*5 x 4 x 4"),
        (idx_bytes(IMAGES) + b"x", r"has 97 bytes\n.*96, "),
        (idx_bytes(IMAGES)[:9], r"has 9 bytes\n.*16, "),
        (idx_bytes(IMAGES.reshape(5, 16)), r"starts with 00000802\n.*00000803"),
        (b"<html>404</html>", r"starts with 3c68746d"),
        (b"", r"starts with nothing"),
        (gzip.compress(idx_bytes(IMAGES))[:-12], r"cannot be read"),
        (gzip.compress(idx_bytes(IMAGES))[:20] + b"\xff" * 30, r"cannot be read"),
        (gzip.compress(idx_bytes(IMAGES)[:-1]), r"has 95 bytes"),
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
    with pytest.raises(DataError, match="has 116 bytes"):
        read_idx(path, num_dims=3)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing-here.*No such file"):
        read_idx(tmp_path / "nothing-here", num_dims=1)
