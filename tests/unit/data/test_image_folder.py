import builtins
import pickle
import time

import numpy as np
import pytest
import torch

from ddp_train.data.image_folder import ImageFolder
from ddp_train.errors import DataError
from tests.unit.data_files import write_image_tree
from tests.unit.parts import components

Image = pytest.importorskip("PIL.Image")


def test_classes_are_the_sorted_folder_names(tmp_path):
    write_image_tree(tmp_path, classes=("zebra", "ant", "cow"), per_class=2)
    data = ImageFolder(str(tmp_path))
    assert data.classes == ("ant", "cow", "zebra")
    assert data.facts == {"image_shape": (3, 12, 8), "num_classes": 3, "classes": ("ant", "cow", "zebra")}
    assert data.batch(np.arange(6))[1].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("in_memory", [False, True])
def test_images_are_the_files_pixels_normalised(tmp_path, in_memory):
    write_image_tree(tmp_path)
    images, labels = ImageFolder(str(tmp_path), "test", in_memory=in_memory).batch(np.asarray([4, 0]))
    pixels = [np.asarray(Image.open(tmp_path / "test" / name)) for name in ("dog/1.png", "cat/0.png")]
    expected = (np.stack(pixels).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
    assert labels.tolist() == [1, 0]


def test_images_without_labels_are_a_batch_by_themselves(tmp_path):
    write_image_tree(tmp_path, splits=("",))
    with pytest.raises(DataError, match=r"has no class folders[\s\S]*data\.labelled=false"):
        ImageFolder(str(tmp_path / "cat"), "")
    data = ImageFolder(str(tmp_path / "cat"), "", labelled=False)
    labelled = ImageFolder(str(tmp_path), "")
    assert torch.equal(data.batch(np.arange(3)), labelled.batch(np.arange(3))[0])
    assert data.facts == {"image_shape": (3, 12, 8)}
    assert data.where(1) == str(tmp_path / "cat/1.png")
    assert data.labels is None
    with pytest.raises(DataError, match="has no images"):
        ImageFolder(str(tmp_path), "", labelled=False)


def test_an_empty_split_reads_classes_directly_in_root(tmp_path):
    write_image_tree(tmp_path, splits=("",))
    assert len(ImageFolder(str(tmp_path), "")) == 6


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG", ".png", ".bmp", ".webp"])
def test_each_format_is_read(tmp_path, suffix):
    write_image_tree(tmp_path, suffix=suffix)
    assert ImageFolder(str(tmp_path)).batch(np.arange(6))[0].shape == (6, 3, 12, 8)


def test_other_files_and_hidden_folders_are_passed_over(tmp_path):
    write_image_tree(tmp_path)
    (tmp_path / "train" / "README.txt").write_text("")
    (tmp_path / "train" / "cat" / "Thumbs.db").write_text("")
    (tmp_path / "train" / ".cache").mkdir()
    assert len(ImageFolder(str(tmp_path))) == 6


def test_resizing_keeps_the_middle_and_the_proportions(tmp_path):
    folder = tmp_path / "train" / "flag"
    folder.mkdir(parents=True)
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255  # a white square between two black ones
    Image.fromarray(pixels).save(folder / "wide.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(folder / "tall.png")
    images, _ = ImageFolder(str(tmp_path), image_size=10).batch(np.arange(2))
    assert images.shape == (2, 3, 10, 10)
    assert (images[:, :, 1:-1, 1:-1] == 1).all()


def test_images_of_several_sizes_need_an_image_size(tmp_path):
    write_image_tree(tmp_path)
    Image.new("RGB", (5, 6)).save(tmp_path / "train" / "dog" / "1.png")
    with pytest.raises(DataError, match=r"image 4, .*dog/1\.png, is 6 x 5 pixels\n.*12 x 8.*\n.*data\.image_size=8") as caught:
        ImageFolder(str(tmp_path), in_memory=True)
    assert caught.value.key == "data.image_size"
    with pytest.raises(DataError, match="image 4"):
        ImageFolder(str(tmp_path)).batch(np.asarray([0, 4]))
    assert ImageFolder(str(tmp_path), image_size=8).batch(np.arange(6))[0].shape == (6, 3, 8, 8)


def test_grey_and_transparent_images_become_rgb_and_rgb_can_become_grey(tmp_path):
    write_image_tree(tmp_path)
    Image.new("L", (8, 12), 128).save(tmp_path / "train" / "cat" / "0.png")
    Image.new("RGBA", (8, 12)).save(tmp_path / "train" / "cat" / "1.png")
    assert ImageFolder(str(tmp_path)).batch(np.arange(6))[0].shape == (6, 3, 12, 8)
    grey = ImageFolder(str(tmp_path), channels=1, mean=[0.0], std=[1.0])
    assert grey.facts["image_shape"] == (1, 12, 8)
    np.testing.assert_allclose(grey.batch(np.asarray([0]))[0].numpy(), 128 / 255, atol=1e-6)


@pytest.mark.parametrize("content", [b"", b"not an image", "truncated"])
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_damaged_image_is_named_with_its_index(tmp_path, content, suffix):
    write_image_tree(tmp_path, suffix=suffix)
    path = tmp_path / "train" / "dog" / f"2{suffix}"
    path.write_bytes(path.read_bytes()[:-40] if content == "truncated" else content)
    with pytest.raises(DataError, match=rf"image 5, .*dog/2\{suffix}, cannot be decoded"):
        ImageFolder(str(tmp_path)).batch(np.asarray([1, 5]))
    with pytest.raises(DataError, match="image 5"):
        ImageFolder(str(tmp_path), in_memory=True)


def test_missing_folders_are_clear_errors(tmp_path):
    with pytest.raises(DataError, match="No such file") as caught:
        ImageFolder(str(tmp_path / "nowhere"))
    assert caught.value.key == "data.root"
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"train has no class folders\n.*found nothing"):
        ImageFolder(str(tmp_path))
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(DataError, match="cat has no images"):
        ImageFolder(str(tmp_path))


def test_missing_pillow_says_what_to_install(tmp_path, monkeypatch):
    write_image_tree(tmp_path)
    real_import = builtins.__import__

    def import_without_pillow(name, *args, **kwargs):
        if name.startswith("PIL"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_pillow)
    with pytest.raises(DataError, match=r'pip install "ddp-train\[image\]"'):
        ImageFolder(str(tmp_path))


def test_it_augments_and_travels_to_a_worker(tmp_path):
    write_image_tree(tmp_path)
    data = ImageFolder(str(tmp_path), crop_padding=2, flip=True)
    again = pickle.loads(pickle.dumps(data))
    keys = np.arange(6, dtype=np.uint64)
    images, _ = data.augment(data.batch(np.arange(6)), keys, np.arange(6))
    assert torch.equal(images, again.augment(again.batch(np.arange(6)), keys, np.arange(6))[0])
    assert images.min() >= -1


def test_listing_is_fast(tmp_path):
    write_image_tree(tmp_path, splits=("train",), classes=("a",), per_class=1)
    for index in range(5000):
        (tmp_path / "train" / "a" / f"more{index}.jpg").touch()
    started = time.perf_counter()
    assert len(ImageFolder(str(tmp_path))) == 5001
    assert time.perf_counter() - started < 1


def test_a_split_that_is_not_there_is_told_with_those_that_are(tmp_path):
    write_image_tree(tmp_path, splits=("train", "val"))
    typed = ["data=image_folder", f"data.root={tmp_path}", "loader.num_workers=0", "model=mlp", "~metrics.tensorboard"]
    with pytest.raises(DataError) as raised:
        components(*typed, base=[])
    assert raised.value.key == "data.eval.split"
    assert (raised.value.happened, raised.value.expected) == (f"is 'test', and {tmp_path} has no such folder", "train, val")
    assert raised.value.fix.startswith("data.eval.split=FOLDER_IN_IT")
    with pytest.raises(DataError, match=r"is 'trian'"):
        components(*typed, "data.split=trian", base=[])
