"""Files: errors of parsers, and files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def reading(path: Path, remedy: str = "save it again") -> Iterator[None]:
    """Turns any exception of a parser into a ValueError that names the file and a remedy."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:  # damaged bytes reach any line of a parser
        # TensorStore appends its arguments, many lines.
        reason = str(error).partition(" [tensorstore_spec=")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}. If it is damaged, {remedy}.") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns any error of a writer, such as a full disk, into an OSError that names the file."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # libraries have errors of their own for a full disk
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise OSError(f"{path} cannot be written: {reason}. Nothing there has changed.") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to; moves the file there to `path` if the block raises nothing.

    Raises:
      OSError: nothing can be written there; the message names `path`.
    """
    with writing(path), temporary_folder(path) as folder:
        yield folder / "new"
        os.replace(folder / "new", path)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yields a new hidden folder next to a path, and removes it."""
    with tempfile.TemporaryDirectory(prefix=".sparsity-", dir=path.absolute().parent) as folder:
        yield Path(folder)
