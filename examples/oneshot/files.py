"""Files of this machine as inputs of magika's network, and their types by their extensions."""

from __future__ import annotations

import functools
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import magika
import numpy as np

PACKAGE = Path(magika.__file__).parent
MODEL = PACKAGE / "models" / magika.Magika().get_model_name()
CONFIG = json.loads((MODEL / "config.min.json").read_text())
LABELS = CONFIG["target_labels_space"]


def collect(*most: int) -> list[list[Path]]:
    """Finds files whose extension tells their type, in parts, such as to calibrate and to test.

    No folder gives files to two parts, and no two files are the same input.

    Args:
      most: files of each type, for each part.
    """
    types = _types_by_extension()
    parts: list[list[Path]] = [[] for _ in most]
    counts: Counter[tuple[int, str]] = Counter()
    seen = set()
    for path in sorted(_files(), key=lambda path: zlib.crc32(bytes(path))):
        part = zlib.crc32(bytes(path.parent)) % len(parts)
        type_ = types.get(path.suffix.lower())
        if type_ is None or counts[part, type_] == most[part]:
            continue
        if (read := features(path)) is not None and read.tobytes() not in seen:
            seen.add(read.tobytes())
            counts[part, type_] += 1
            parts[part].append(path)
    return parts


def features(path: Path) -> np.ndarray | None:
    """The first and last bytes without white space around them, as magika reads them.

    Returns:
      int32[2048], or `None` if the file is too short for the network.
    """
    size, block, shortest = CONFIG["beg_size"], CONFIG["block_size"], CONFIG["min_file_size_for_dl"]
    try:
        with path.open("rb") as file:
            start = file.read(block).lstrip()
            file.seek(max(path.stat().st_size - block, 0))
            end = file.read(block).rstrip()
    except OSError:  # a link to nothing, or a file of somebody else's
        return None
    if min(len(start), len(end)) < shortest:
        return None
    first = np.frombuffer(start[:size], np.uint8)
    last = np.frombuffer(end[-size:], np.uint8)
    values = np.full(2 * size, CONFIG["padding_token"], np.int32)
    values[: len(first)] = first
    values[2 * size - len(last) :] = last
    return values


def truth(path: Path) -> int:
    """The number of a file's type among the outputs of the network."""
    return LABELS.index(_types_by_extension()[path.suffix.lower()])


@functools.cache
def _types_by_extension() -> dict[str, str]:
    """{extension: type} where magika knows a single type that has the extension."""
    catalog = json.loads((PACKAGE / "config" / "content_types_kb.min.json").read_text())
    types: dict[str, list[str]] = {}
    for name, described in catalog.items():
        for extension in described["extensions"]:
            types.setdefault(f".{extension}", []).append(name)
    return {key: names[0] for key, names in types.items() if len(names) == 1 and names[0] in LABELS}


def _files() -> Iterator[Path]:
    """Files that come with Python, its packages and the system."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share"}
    for top in folders:
        for folder, _, names in os.walk(top):
            yield from (Path(folder, name) for name in names if "." in name)
