"""Arrays of Zarr, read as streams."""

import numpy as np
import pytest
import tensorstore

from sparsity.cli import zarr

VALUES = np.random.default_rng(0).integers(0, 4, (70, 30)).astype(np.float32)
VALUES[20:45] = 0  # a chunk of zeros alone is not stored
V2 = {"driver": "zarr", "metadata": {"chunks": [20, 30]}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
SHARD = {"chunk_shape": [20, 30], "codecs": [BYTES, {"name": "zstd"}], "index_location": "end"}


def v3(*codecs):
    grid = {"name": "regular", "configuration": {"chunk_shape": [20, 30]}}
    return {"driver": "zarr3", "metadata": {"chunk_grid": grid, "codecs": list(codecs)}}


def metadata(**changes):
    return {"driver": "zarr", "metadata": V2["metadata"] | changes}


STREAMED = {
    "plain": metadata(compressor=None),
    "zstd": metadata(compressor={"id": "zstd", "level": 3}),
    "slashes": metadata(compressor={"id": "zstd"}, dimension_separator="/"),
    "plain, 3": v3(BYTES),
    "zstd, 3": v3(BYTES, {"name": "zstd"}),
    "shards": v3({"name": "sharding_indexed", "configuration": SHARD}),
}
OTHERS = {
    "columns": metadata(compressor=None, order="F"),
    "parts of rows": metadata(compressor=None, chunks=[20, 10]),
    "blosc": metadata(),
    "fill value": metadata(compressor=None, fill_value=2.0, dtype="<f4"),
    "big endian": metadata(compressor=None, dtype=">f4"),
    "big endian, 3": v3({"name": "bytes", "configuration": {"endian": "big"}}),
    "gzip, 3": v3(BYTES, {"name": "gzip"}),
    "small parts of shards": v3(
        {"name": "sharding_indexed", "configuration": SHARD | {"chunk_shape": [10, 30]}}
    ),
}


def stored(tmp_path, spec, values=VALUES):
    """An array of TensorStore with these values."""
    spec = spec | {"kvstore": f"file://{tmp_path}/array/"}
    dtype = {} if "dtype" in spec["metadata"] else {"dtype": values.dtype.name}
    array = tensorstore.open(spec, create=True, shape=values.shape, **dtype).result()
    array.write(values).result()
    return array


@pytest.mark.parametrize("name", STREAMED)
def test_the_bytes_are_those_of_the_array_piece_by_piece(tmp_path, name):
    array = stored(tmp_path, STREAMED[name])
    parts = list(zarr.stream(array, 1000))
    assert [len(part) for part in parts] == [1000] * 8 + [400]
    np.testing.assert_array_equal(np.frombuffer(b"".join(parts), np.float32), VALUES.reshape(-1))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_stored_in_another_order_or_code_is_left_to_tensorstore(tmp_path, name):
    assert zarr.stream(stored(tmp_path, OTHERS[name]), 1000) is None


def test_a_number_has_no_stream(tmp_path):
    assert zarr.stream(stored(tmp_path, metadata(chunks=[]), np.float32(1)), 1000) is None


@pytest.mark.parametrize("name", ["plain", "zstd"])
def test_a_chunk_that_was_cut_off_is_an_error(tmp_path, name):
    array = stored(tmp_path, STREAMED[name])
    chunk = tmp_path / "array" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(ValueError, match="chunk 0 ends"):
        list(zarr.stream(array, 1000))
