import pickle
import pickletools

import numpy as np
import pytest
import torch

from ddp_train.data.cifar10 import CIFAR10
from ddp_train.errors import DataError
from tests.unit.data_files import random_images, serve, sha256, write_cifar_binary, write_cifar_python, write_pickle, write_tar


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize(
    ("write", "folder"),
    [
        (write_cifar_binary, ""),
        (write_cifar_binary, "cifar-10-batches-bin"),
        (write_cifar_python, ""),
        (write_cifar_python, "cifar-10-batches-py"),
    ],
)
def test_both_versions_give_the_same_images_in_each_layout(tmp_path, write, folder):
    write(tmp_path / folder, per_file=4)
    train, test = CIFAR10(str(tmp_path)), CIFAR10(str(tmp_path), "test")
    assert (len(train), len(test)) == (20, 4)
    assert train.facts == {"image_shape": (3, 32, 32), "num_classes": 10}
    images, labels = train.batch(np.asarray([5, 19]))
    pixels = np.stack([random_images(4, 3, 32, seed=1)[1], random_images(4, 3, 32, seed=4)[3]])
    expected = (pixels / 255 - np.reshape([0.4914, 0.4822, 0.4465], (3, 1, 1))) / np.reshape([0.2470, 0.2435, 0.2616], (3, 1, 1))
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-5)
    assert labels.tolist() == [1, 3]


def test_the_official_python_2_pickles_are_read(tmp_path):
    write_cifar_python(tmp_path)
    path = tmp_path / "test_batch"
    pixels = random_images(4, 3, 32, seed=5).reshape(4, -1)
    path.write_bytes(python_2_pickle(pixels, [0, 1, 2, 3]))
    assert any(opcode.name == "BINSTRING" for opcode, _, _ in pickletools.genops(path.read_bytes()))
    written_by_2 = CIFAR10(str(tmp_path), "test").batch(np.arange(4))
    write_cifar_python(tmp_path)
    assert torch.equal(written_by_2[0], CIFAR10(str(tmp_path), "test").batch(np.arange(4))[0])


def test_a_size_that_is_no_multiple_of_a_record_is_refused(tmp_path):
    write_cifar_binary(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 12291 bytes\n.*3073"):
        CIFAR10(str(tmp_path))


@pytest.mark.parametrize(("write", "name"), [(write_cifar_binary, "data_batch_4.bin"), (write_cifar_python, "data_batch_4")])
def test_a_missing_file_is_named(tmp_path, write, name):
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        CIFAR10(str(tmp_path))


def test_an_empty_file_is_refused(tmp_path):
    write_cifar_binary(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin has 0 labels"):
        CIFAR10(str(tmp_path), "test")


def test_a_label_above_nine_is_refused(tmp_path):
    write_cifar_binary(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch\.bin has labels from 10 to 10"):
        CIFAR10(str(tmp_path), "test")


class Malicious:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("where", ["whole", "labels", "data"])
def test_a_malicious_pickle_does_not_execute(tmp_path, where):
    write_cifar_python(tmp_path)
    marker = tmp_path / "executed"
    evil = Malicious((eval, (f"open({str(marker)!r}, 'w')",)))
    honest = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}
    write_pickle(tmp_path / "test_batch", evil if where == "whole" else {**honest, where.encode(): evil})
    with pytest.raises(DataError, match="not allowed"):
        CIFAR10(str(tmp_path), "test")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "numpy.load", "numpy.ndarray.tofile", "builtins.getattr", "numpy.core.multiarray.fromfile"])
def test_no_other_name_is_resolved(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    write_cifar_python(tmp_path)
    (tmp_path / "test_batch").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(DataError, match="not allowed"):
        CIFAR10(str(tmp_path), "test")


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8)},
        {b"data": np.zeros((1, 3072), np.float32), b"labels": [0]},
        {b"data": np.zeros((1, 3071), np.uint8), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": b"bytes", b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0.5]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [[0]]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": 0},
    ],
    ids=[
        *("no dict", "no data", "no labels", "float pixels", "row too short", "row too many", "data not an array"),
        *("negative label", "half a label", "label in words", "nested labels", "a single label"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, content):
    write_cifar_python(tmp_path)
    write_pickle(tmp_path / "test_batch", content)
    with pytest.raises(DataError, match="test_batch"):
        CIFAR10(str(tmp_path), "test")


def test_a_truncated_pickle_is_refused(tmp_path):
    write_cifar_python(tmp_path)
    path = tmp_path / "test_batch"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match="test_batch cannot be read"):
        CIFAR10(str(tmp_path), "test")


def test_missing_data_is_downloaded_and_unpacked(tmp_path):
    tar = write_tar(tmp_path / "cifar-10-binary.tar.gz", write_cifar_binary(tmp_path / "published" / "cifar-10-batches-bin"))
    with serve(tmp_path) as address:
        url = f"{address}{tar.name}"

        class Served(CIFAR10):
            address, sha256 = url, sha256(tar)

        assert len(Served(str(tmp_path / "data"))) == 20
    assert len(Served(str(tmp_path / "data"), "test")) == 4
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-bin"]


def python_2_pickle(pixels, labels):
    """Write what Python 2 wrote: protocol 2, byte strings as BINSTRING, numpy's functions under their old names."""
    raw = pixels.tobytes()
    return b"".join(
        [
            b"\x80\x02}(",
            *(b"U\x04data", b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"K\x00\x85", b"U\x01b", b"\x87R"),
            *(b"(K\x01", b"K\x04M\x00\x0c\x86", b"cnumpy\ndtype\n", b"U\x02u1K\x00K\x01\x87R"),
            *(b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb", b"\x89"),
            *(b"T" + len(raw).to_bytes(4, "little") + raw, b"tb"),
            *(b"U\x06labels", b"]("),
            *(b"K" + bytes([label]) for label in labels),
            b"eu.",
        ]
    )


def test_the_python_2_writer_writes_a_valid_pickle():
    content = pickle.loads(python_2_pickle(np.zeros((4, 3072), np.uint8), [0, 1, 2, 3]), encoding="bytes")
    assert content[b"labels"] == [0, 1, 2, 3]
