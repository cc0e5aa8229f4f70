"""Arrays of Zarr as streams: TensorStore reads a chunk whole, and a chunk may be a whole array."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from sparsity.core import extras

INDEX = struct.Struct("<QQI")  # of a shard of one chunk: where it starts, its bytes, a checksum


class _Codec(NamedTuple):
    """How a chunk is stored.

    Attributes:
      prefix: of its key.
      separator: of the numbers in its key.
      is_compressed: by zstd, the only compression that is streamed.
      is_shard: whether an index follows it.
    """

    prefix: str
    separator: str
    is_compressed: bool
    is_shard: bool


def stream(array: Any, step: int) -> Iterator[bytes] | None:
    """The bytes of an array of TensorStore in C order, so many at a time, fewer in the end.

    Returns:
      `None` if its chunks are no parts of that order, or are stored otherwise than Orbax does.
    """
    if not array.rank:
        return None
    layout = array.chunk_layout
    chunk = layout.write_chunk.shape
    codec = _codec(array.spec().to_json()["metadata"])
    in_order = chunk[1:] == array.shape[1:] and list(layout.inner_order) == [*range(array.rank)]
    if codec is None or not in_order or layout.read_chunk.shape != chunk:
        return None
    return _pieces(array, codec, step)


def _codec(metadata: dict[str, Any]) -> _Codec | None:
    if metadata["fill_value"]:
        return None
    if metadata["zarr_format"] == 2:
        compressor = metadata["compressor"]
        is_known = (compressor or {"id": "zstd"})["id"] == "zstd" and not metadata["filters"]
        if not is_known or metadata["dtype"].startswith(">"):
            return None
        return _Codec("", metadata["dimension_separator"], bool(compressor), False)
    codecs, is_shard = metadata["codecs"], False
    if codecs[0]["name"] == "sharding_indexed":
        outer = codecs[0]["configuration"]
        codecs, is_shard = outer["codecs"], True
        if len(outer["index_codecs"]) != 2 or outer.get("index_location", "end") != "end":
            return None
    is_known = [codec["name"] for codec in codecs] in (["bytes"], ["bytes", "zstd"])
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    if not is_known or endian != "little" or metadata["chunk_key_encoding"]["name"] != "default":
        return None
    return _Codec("c/", "/", len(codecs) == 2, is_shard)


def _pieces(array: Any, codec: _Codec, step: int) -> Iterator[bytes]:
    rows, row_bytes = array.shape[0], array.dtype.numpy_dtype.itemsize * math.prod(array.shape[1:])
    of_chunk = array.chunk_layout.write_chunk.shape[0]
    piece = bytearray()
    for number, start in enumerate(range(0, rows, of_chunk)):
        numbers = [str(number), *["0"] * (array.rank - 1)]
        chunk = _open(array.kvstore, codec.prefix + codec.separator.join(numbers), codec)
        left = min(of_chunk, rows - start) * row_bytes  # the last chunk may be padded
        while left:
            wanted = min(left, step - len(piece))
            part = bytes(wanted) if chunk is None else chunk.read(wanted)
            if not part:
                raise ValueError(f"chunk {number} ends {left} bytes early")
            piece += part
            left -= len(part)
            if len(piece) == step:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


def _open(store: Any, key: str, codec: _Codec) -> Any:
    """A chunk, open for reading; `None` if it is all zeros and not stored."""
    value = _Value(store, key)
    if codec.is_shard:
        tail = store.read(key, byte_range=slice(-INDEX.size, None)).result()
        if tail.state == "missing":
            return None
        value.at, size, _ = INDEX.unpack(tail.value)
        value.end = value.at + size
    elif store.read(key, byte_range=slice(0, 0)).result().state == "missing":
        return None
    if not codec.is_compressed:
        return value
    zstd = extras.load("zstandard", "cli").ZstdDecompressor()
    return zstd.stream_reader(value, read_size=1 << 20)


class _Value:
    """A stored value, read like a file."""

    def __init__(self, store: Any, key: str) -> None:
        self.store, self.key = store, key
        self.at, self.end = 0, math.inf

    def read(self, size: int) -> bytes:
        """The next bytes, so many at most."""
        stop: Any = min(self.at + size, self.end)
        if stop == self.at:
            return b""
        try:
            part: bytes = self._between(stop)
        except ValueError:  # the value ends before
            part = self._between(None)
            self.end = self.at + len(part)
        self.at += len(part)
        return part

    def _between(self, stop: int | None) -> bytes:
        found: bytes = self.store.read(self.key, byte_range=slice(self.at, stop)).result().value
        return found
