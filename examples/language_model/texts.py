"""Texts that Python ships: a manual to calibrate and train with, two others to test."""

from __future__ import annotations

import heapq
import html
import re
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_manual() -> str:
    """Returns the topics of Python's manual, of which tests see nothing."""
    return "\n".join(topics.values())


def read_tests() -> dict[str, str]:
    """Returns the essay on heaps by François Pinard, and the handbook of IDLE."""
    package = find_spec("idlelib")
    if package is None or package.origin is None:
        raise SystemExit("error: this Python has no idlelib (on Debian: the package idle)")
    page = Path(package.origin).with_name("help.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"(?s)<script.*?</script>|<[^>]+>", "", page))
    handbook = re.sub(r"\n\s*\n", "\n\n", text[text.index("IDLE is Python") :])
    return {"essay": heapq.__about__, "handbook": handbook}


def split_tokens(
    tokenizer: Tokenizer, text: str, length: int, number: int | None = None
) -> np.ndarray:
    """Returns windows int32[number, length] of a text, spread evenly; by default all in order."""
    tokens = np.asarray(tokenizer.encode(text).ids, np.int32)
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    if number is None:
        return windows
    return windows[np.linspace(0, len(windows) - 1, number).astype(int)]
