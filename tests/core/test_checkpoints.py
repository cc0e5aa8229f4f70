"""Checkpoints are read lazily, exactly, and from all layouts; foreign ones are refused by name."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from sparsity.calibration import open_checkpoint
from sparsity.core.checkpoints import DTYPES, LazyArray
from tests.cli.checkpoints import ORBAX_LAYOUTS, save_orbax_layout

INDICES = [
    (..., 1),
    (),
    1,
    -1,
    (1, 2),
    (1, 2, 3),
    (slice(1, 3),),
    (slice(None), 2),
    (slice(None, None, 2), slice(1, 2)),
    (0, slice(-2, None)),
    (slice(2, 1),),
    (np.int64(2), slice(None), np.array([0, 3])),
    [2, 0],
    (slice(5, 9),),
    None,
]


def stack(dtype="float32"):
    return np.arange(4 * 3 * 5).reshape(4, 3, 5).astype(dtype)


def save_safetensors(path, tree):
    safetensors.numpy.save_file(tree, path)


def save_npz(path, tree):
    np.savez(path, **tree)


def save_compressed(path, tree):
    np.savez_compressed(path, **tree)


FILES = [("a.safetensors", save_safetensors), ("a.npz", save_npz), ("b.npz", save_compressed)]


@pytest.mark.parametrize(("name", "save"), FILES)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_every_index_reads_what_numpy_selects(tmp_path, name, save, index):
    save(tmp_path / name, {"other": np.ones(3), "w": stack()})
    array = open_checkpoint(tmp_path / name)["w"]
    np.testing.assert_array_equal(array[index], stack()[index], strict=True)
    with pytest.raises(IndexError):
        array[9]


@pytest.mark.parametrize(("database", "zarr3"), ORBAX_LAYOUTS)
def test_orbax_is_read_layer_by_layer_and_keeps_what_is_no_array(tmp_path, database, zarr3):
    bf16 = jnp.asarray(stack(), jnp.bfloat16)
    tree = {"a b": {"w": bf16, "v": stack("float64")}, "list": [stack()] * 2, "text": "t"}
    others = {"number": 2.5, "nothing": None, "key": jax.random.key(3)}
    save_orbax_layout(tmp_path / "c", tree | others, database=database, zarr3=zarr3)
    opened = open_checkpoint(tmp_path / "c")
    assert isinstance(opened["a b"]["w"], LazyArray)
    assert (opened["a b"]["w"].dtype, opened["text"], opened["number"]) == (bf16.dtype, "t", 2.5)
    assert opened["key"] == others["key"]
    for index in INDICES:
        if not isinstance(index, list):
            np.testing.assert_array_equal(opened["a b"]["w"][index], np.asarray(bf16)[index])
        np.testing.assert_array_equal(opened["list"][1][index], stack()[index])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_of_safetensors_keeps_its_bits(tmp_path, dtype):
    values = np.arange(8).astype(dtype)
    code = next(code for code, name in DTYPES.items() if name == dtype)
    entry = {"dtype": code, "shape": [2, 4], "data_offsets": [0, values.nbytes]}
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    array = open_checkpoint(path)["w"]
    assert (array.dtype, array.nbytes) == (values.dtype, values.nbytes)
    assert np.asarray(array).tobytes() == values.tobytes()
    assert array[1].tobytes() == values[4:].tobytes()


@pytest.mark.parametrize(("name", "save"), FILES)
def test_scalars_empty_arrays_and_the_order_of_fortran_are_read(tmp_path, name, save):
    tree = {"scalar": np.float32(3), "empty": np.zeros((0, 2)), "f": np.asfortranarray(stack())}
    tree = {key: np.asarray(value) for key, value in tree.items()}
    if name.endswith("safetensors"):
        tree["f"] = stack()
    save(tmp_path / name, tree)
    opened = open_checkpoint(tmp_path / name)
    for key, value in tree.items():
        np.testing.assert_array_equal(opened[key], value, strict=True)
    np.testing.assert_array_equal(opened["f"][2, 1:], stack()[2, 1:])
    assert opened["empty"][:0].shape == (0, 2)


def test_reading_a_layer_reads_no_other(tmp_path):
    """The file is cut in the middle of the last layer: the layers before it are there."""
    for name, save in FILES[:2]:
        save(tmp_path / name, {"w": stack()})
        array = open_checkpoint(tmp_path / name)["w"]
        data, status = (tmp_path / name).read_bytes(), (tmp_path / name).stat()
        values = data.index(stack().tobytes())
        (tmp_path / name).write_bytes(data[: values + 3 * 3 * 5 * 4] + bytes(len(data)))
        os.truncate(tmp_path / name, status.st_size)
        os.utime(tmp_path / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        np.testing.assert_array_equal(array[2], stack()[2])
        assert not array[3].any()


def test_a_file_that_changes_after_it_was_opened_is_not_read(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"w": stack()})
    array = open_checkpoint(tmp_path / "a.safetensors")["w"]
    save_safetensors(tmp_path / "a.safetensors", {"w": stack()[:2]})
    with pytest.raises(ValueError, match="has changed since it was opened"):
        array[0]


# Folders of Hugging Face.


def save_shards(folder, weight_map=None):
    save_safetensors(folder / "x-1.safetensors", {"a": stack(), "b": np.ones(2)})
    save_safetensors(folder / "x-2.safetensors", {"c": stack("bfloat16")})
    names = {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names | (weight_map or {})}))
    return index


def test_shards_are_one_tree(tmp_path):
    save_shards(tmp_path)
    opened = open_checkpoint(str(tmp_path))
    assert set(opened) == {"a", "b", "c"}
    np.testing.assert_array_equal(opened["c"][1], stack("bfloat16")[1])


def test_links_of_shards_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_shards(tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "snapshot")["a"], stack())


def test_a_folder_with_one_file_is_that_file(tmp_path):
    save_safetensors(tmp_path / "model.safetensors", {"w": stack()})
    np.testing.assert_array_equal(open_checkpoint(tmp_path)["w"], stack())


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"d": "x-3.safetensors"}, "names the file 'x-3.safetensors', which .* lacks"),
        (
            {"d": "../x-1.safetensors"},
            "names the file '../x-1.safetensors', which is not in its folder",
        ),
        ({"d": ".."}, "names the file '..', which .* lacks"),
        ({"d": "/etc/passwd"}, "names the file '/etc/passwd', which is not in its folder"),
        ({"d": 3}, "cannot be read"),
        ({"d": "x-2.safetensors"}, "names 'd' in 'x-2.safetensors', which lacks it"),
    ],
)
def test_a_foreign_index_is_refused_by_name(tmp_path, weight_map, message):
    index = save_shards(tmp_path, weight_map)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(index) in str(caught.value)


def test_two_shards_with_one_name_are_refused(tmp_path):
    save_shards(tmp_path)
    save_safetensors(tmp_path / "x-2.safetensors", {"c": stack(), "a": stack()})
    with pytest.raises(ValueError, match="'a' comes twice"):
        open_checkpoint(tmp_path)


def test_a_cut_shard_is_named(tmp_path):
    save_shards(tmp_path)
    os.truncate(tmp_path / "x-2.safetensors", 150)
    with pytest.raises(ValueError, match=r"x-2\.safetensors cannot be read: it has 7\d bytes"):
        open_checkpoint(tmp_path)


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no known format. Known are files that"):
        open_checkpoint(tmp_path)


def test_text_in_npz_is_refused_when_it_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", text=np.array(["a"]), w=stack())
    opened = open_checkpoint(tmp_path / "a.npz")
    np.testing.assert_array_equal(opened["w"], stack())
    with pytest.raises(ValueError, match="'text': dtype <U1 holds no numbers"):
        opened["text"][...]
