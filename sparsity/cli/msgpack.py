"""Checkpoints in flax's msgpack: nested maps whose arrays are extensions of type 1.

Read here and not by the package of that name, which takes every array into memory. Formats:
https://github.com/msgpack/msgpack/blob/master/spec.md, and `flax.serialization` for arrays: an
extension holds (shape, name of the dtype, bytes); one of more than 1 GiB is a map of flat parts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, BinaryIO

from sparsity.cli.leaf import StoredLeaf, copy_with, number_dtype

ARRAY, SCALAR = 1, 3  # flax's types of extensions that hold an array
PARTS = "__msgpack_chunked_array__"

# Of tags that are followed by a length: what comes, and how many bytes the length takes.
LENGTHS = {
    0xC4: ("bytes", 1),
    0xC5: ("bytes", 2),
    0xC6: ("bytes", 4),
    0xC7: ("extension", 1),
    0xC8: ("extension", 2),
    0xC9: ("extension", 4),
    0xD9: ("text", 1),
    0xDA: ("text", 2),
    0xDB: ("text", 4),
    0xDC: ("list", 2),
    0xDD: ("list", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
# Of tags that say the length themselves.
FIXED = {
    0xC0: ("other", 0),
    0xC2: ("other", 0),
    0xC3: ("other", 0),  # nil, false, true
    0xCA: ("other", 4),
    0xCB: ("other", 8),  # floats
    **{0xCC + i: ("integer", 2**i) for i in range(4)},
    **{0xD0 + i: ("integer", 2**i) for i in range(4)},
    **{0xD4 + i: ("extension", 2**i) for i in range(5)},
}

write = copy_with


def read(path: Path) -> Any:
    """Returns the nested maps of a file, with `None` for what is no array."""
    with path.open("rb") as file:
        tree = _Parser(file, path).value()
        if file.read(1):
            raise ValueError("bytes follow its end")
    if not isinstance(tree, dict):
        raise ValueError("it holds no map of arrays")
    return _arrays(tree)


@dataclasses.dataclass(frozen=True)
class _Parser:
    """Reads values from where a file is; long bytes are passed over, and told by where they lie."""

    file: BinaryIO
    path: Path

    def value(self) -> Any:
        """The next value; of `bytes`, offset and length."""
        kind, length = self._head()
        match kind:
            case "map":
                return {self.value(): self.value() for _ in range(length)}
            case "list":
                return [self.value() for _ in range(length)]
            case "text":
                return self._read(length).decode()
            case "integer":
                return int.from_bytes(self._read(length), "big")
            case "bytes":
                return self._skip(length)
            case "extension":
                return self._extension(length)
            case "small":
                return length
        self._skip(length)
        return None

    def _head(self) -> tuple[str, int]:
        """What comes next, and how long it is."""
        tag = self._read(1)[0]
        if tag < 0x80:
            return "small", tag
        if tag < 0xC0:
            kinds = {0x80: ("map", 0x0F), 0x90: ("list", 0x0F)}
            kind, bits = kinds.get(tag & 0xF0, ("text", 0x1F))
            return kind, tag & bits
        if tag >= 0xE0:
            return "other", 0
        if tag in LENGTHS:
            kind, size = LENGTHS[tag]
            return kind, int.from_bytes(self._read(size), "big")
        return FIXED[tag]

    def _extension(self, length: int) -> StoredLeaf | None:
        code = self._read(1)[0]
        if code not in (ARRAY, SCALAR):
            self._skip(length)
            return None
        shape, name, span = self.value()
        return StoredLeaf(tuple(shape), number_dtype(name), self.path, (span,))

    def _skip(self, length: int) -> tuple[int, int]:
        start = self.file.tell()
        self.file.seek(length, 1)
        return start, length

    def _read(self, length: int) -> bytes:
        data = self.file.read(length)
        if len(data) < length:
            raise ValueError("it is cut off")
        return data


def _arrays(tree: Any) -> Any:
    """The tree with joined parts, and `None` for what is no array."""
    if isinstance(tree, dict) and PARTS in tree:
        parts = list(tree["chunks"].values())
        shape = tuple(tree["shape"].values())
        spans = tuple(span for part in parts for span in part.spans)
        return StoredLeaf(shape, parts[0].dtype, parts[0].path, spans)
    if isinstance(tree, dict):
        return {key: _arrays(value) for key, value in tree.items()}
    return tree if isinstance(tree, StoredLeaf) else None
