"""The folder that a run writes block by block, and from which an interrupted run continues.

It holds `model.safetensors` and `masks.safetensors`, which are written in place as `*.part` until
the run is finished, a journal with a line for each finished block, and at last `report.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from sparsity.core import trees
from sparsity.core.checkpoints import (
    Index,
    LazyArray,
    make_header,
    open_checkpoint as open_checkpoint,
    read_header,
    read_part,
    write_all,
    write_part,
)
from sparsity.core.extras import reading, replacing
from sparsity.core.trees import PyTree
from sparsity.programs.program import Program, Value

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of objects, which differs by process
_CHUNK = 1 << 24  # bytes that are copied at once
# The folders that this process writes; a new object for a folder closes the one before.
_OPEN: weakref.WeakValueDictionary[Path, RunFolder] = weakref.WeakValueDictionary()


class RunFolder:
    """The folder of a run: parameters and masks in place, and a journal of finished blocks.

    Args:
      folder: a new or empty folder, or that of the same run.
      identity: what the results depend on, by name.
      params: the dense parameters by name, which are copied to a new folder.
      masks: the names of the parameters that get a mask of uint8.

    Attributes:
      done: the records of the blocks that are finished, by name.
      is_finished: whether all results are written; then nothing is written again.

    Raises:
      ValueError: the folder holds another run or other files, another process writes to it, or
        there are several processes.
      OSError: the folder cannot be written, or its disk is full.

    Example:
      >>> import tempfile
      >>> params = {"layers/kernel": np.ones((2, 3, 4), np.float32)}
      >>> folder = RunFolder(tempfile.mkdtemp(), {"batches": "1f"}, params, ["layers/kernel"])
      >>> folder.write("model", "layers/kernel", (1,), np.zeros((3, 4), np.float32))
      >>> folder.commit("layer 1", {"error": 0.5})
      >>> folder.read("layers/kernel", (slice(None), 0, 0)), folder.done
      (array([1., 0.], dtype=float32), {'layer 1': {'error': 0.5}})
    """

    _close: weakref.finalize[..., RunFolder]  # closes the journal, which frees its lock

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: Mapping[str, str],
        params: Mapping[str, PyTree],
        masks: Sequence[str],
    ) -> None:
        self._folder, self.done = Path(folder).absolute(), dict[str, PyTree]()
        if jax.process_count() > 1:
            raise ValueError(f"out = {folder} serves one process, and there are several.")
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"out = {folder} is a file. Give a new or empty folder.")
        ours = {"journal.jsonl", "model.safetensors.part", "masks.safetensors.part"}
        is_new = not (self._folder / "journal.jsonl").exists()
        if is_new and self._folder.exists() and any(self._folder.iterdir()):
            raise ValueError(f"out = {folder} holds other files. Give a new or empty folder.")
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock()
        lines = self._read_journal()
        if not lines:
            if others := {x.name for x in self._folder.iterdir()} - ours:
                raise ValueError(
                    f"out = {folder} holds other files: {trees.listed(sorted(others))}. Give a "
                    "new or empty folder."
                )
            with self._writing():
                self._start(params, masks)
                self._append({"identity": dict(identity)})
            lines = [{"identity": identity}]
        earlier = lines[0]["identity"]
        names = {**earlier, **identity}
        if differing := [name for name in names if earlier.get(name) != identity.get(name)]:
            raise ValueError(
                f"out = {folder} holds another run: its {trees.listed(differing)} differ. Give "
                "another folder, or delete this one to start afresh."
            )
        self.is_finished = "finished" in lines[-1]
        self.done = {line["block"]: line["record"] for line in lines[1:] if "block" in line}
        for kind in ("model", "masks"):
            if not self._find(kind).exists():
                raise ValueError(
                    f"out = {folder} holds a run, and its {kind}.safetensors is missing. Give "
                    "another folder."
                )
        self._places = {kind: read_header(self._find(kind)) for kind in ("model", "masks")}
        if self.is_finished:
            self._close()

    def write(self, kind: str, name: str, index: Index, array: np.ndarray) -> None:
        """Writes an array of 'model' or 'masks', or the part at an index."""
        with self._writing():
            self._check_open()
            write_part(self._places[kind][name], index, np.asarray(array))

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns a parameter, or the part at an index."""
        return read_part(self._places["model"][name], index)

    def commit(self, block: str, record: PyTree) -> None:
        """Notes that all parts of a block are written, once they are on the disk."""
        with self._writing():
            self._check_open()
            self._sync()
            self._append({"block": block, "record": record})
        self.done[block] = record

    def finish(self, report: Mapping[str, PyTree] | None = None) -> None:
        """Gives the files their names, and writes a report; a finished folder stays as it is."""
        if self.is_finished:
            return
        with self._writing():
            self._sync()
            for kind in ("masks", "model"):
                if (part := self._find(kind)).suffix == ".part":
                    part.replace(part.with_suffix(""))
            with replacing(self._folder / "report.json") as path:
                path.write_text(json.dumps(report or {}, indent=2), encoding="utf-8")
            self._append({"finished": True})
        self._places = {kind: read_header(self._find(kind)) for kind in ("model", "masks")}
        self.is_finished = True
        self._close()

    def open(self, kind: str) -> dict[str, LazyArray]:
        """Returns the arrays of 'model' or 'masks', read when they are indexed."""

        def read(name: str, index: Index) -> np.ndarray:  # of a file that `finish` renames
            return read_part(self._places[kind][name], index)

        return {
            name: LazyArray(x.shape, x.dtype, functools.partial(read, name))
            for name, x in self._places[kind].items()
        }

    def _check_open(self) -> None:
        if not self._close.alive:
            raise OSError("it is finished, or a later call of this process has opened it")

    def _find(self, kind: str) -> Path:
        final = self._folder / f"{kind}.safetensors"
        return final if final.exists() else self._folder / f"{kind}.safetensors.part"

    def _lock(self) -> None:
        """Opens the journal, for this process alone."""
        if (earlier := _OPEN.get(self._folder)) is not None:
            earlier._close()
        path, flags = self._folder / "journal.jsonl", os.O_RDWR | os.O_CREAT
        is_writable = not path.exists() or os.access(path, os.W_OK)  # a result may be read only
        self._journal = os.open(path, flags if is_writable else os.O_RDONLY, 0o666)
        self._close = weakref.finalize(self, os.close, self._journal)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"out = {self._folder} is used by another process.") from error
        _OPEN[self._folder] = self

    def _read_journal(self) -> list[PyTree]:
        """Returns the complete lines; a kill may leave a part of the last one."""
        path = self._folder / "journal.jsonl"
        with reading(path, "delete the folder to start afresh"):
            data = path.read_bytes()
            self._end = data.rfind(b"\n") + 1
            return [json.loads(line) for line in data[: self._end].splitlines()]

    def _append(self, line: PyTree) -> None:
        data = json.dumps(line).encode() + b"\n"
        os.ftruncate(self._journal, self._end)
        write_all(self._journal, memoryview(data), self._end)
        os.fsync(self._journal)
        self._end += len(data)

    def _sync(self) -> None:
        for path in (self._find("model"), self._find("masks")):
            with path.open("rb+") as file:
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns any error of a writer into an OSError that names the folder."""
        try:
            yield
        except OSError as error:
            reason = str(error.strerror or error).rstrip(".")
            raise OSError(
                f"out = {self._folder} cannot be written: {reason}. The {len(self.done)} finished "
                "blocks are kept: the same call continues after them."
            ) from error

    def _start(self, params: Mapping[str, PyTree], masks: Sequence[str]) -> None:
        """Writes the dense parameters, and masks of zeros, which take no space yet."""
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
        mask_shapes = {name: jax.ShapeDtypeStruct(shapes[name].shape, np.uint8) for name in masks}
        headers = {"model": make_header(shapes), "masks": make_header(mask_shapes)}
        needed = sum(len(header) + size for header, size in headers.values())
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(f"the run needs {needed:,} bytes, and {free:,} are free on its disk")
        for kind, (header, size) in headers.items():
            with (self._folder / f"{kind}.safetensors.part").open("wb") as file:
                file.write(header)
                file.truncate(len(header) + size)
        places = read_header(self._find("model"))
        for name, array in params.items():
            for index in _list_chunks(*places[name][1:3]):
                write_part(places[name], index, np.asarray(array[index] if index else array))
        self._sync()


def _list_chunks(shape: tuple[int, ...], dtype: np.dtype) -> list[Index]:
    """Returns indices of the parts that are copied at once."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if not shape or shape[0] * row_bytes <= _CHUNK:
        return [()]
    size = max(_CHUNK // row_bytes, 1)
    return [(slice(i, i + size),) for i in range(0, shape[0], size)]


def copy_metadata(source: PyTree, folder: str | os.PathLike[str]) -> None:
    """Copies the configuration and the tokenizer of a Hugging Face folder, if `source` is one."""
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        return
    for path in Path(source).iterdir():
        is_kept = path.suffix in (".json", ".txt", ".model", ".jinja") and path.is_file()
        target = Path(folder) / path.name
        # The report of this folder is its own, and shards of the source are not here.
        if is_kept and not path.name.endswith((".index.json", "report.json")):
            with replacing(target) as new:
                shutil.copyfile(path, new)


def describe_program(program: Program) -> PyTree:
    """Returns what a program computes: its equations with what they read, hold and do."""
    numbers: dict[Value, PyTree] = {value: i for i, value in enumerate(program.inputs)}
    equations = []
    for equation in program.flat_equations():
        inputs = [numbers.get(x, x.constant) for x in equation.inputs]
        params = {name: _ADDRESS.sub("", repr(x)) for name, x in equation.params.items()}
        bodies = [*map(describe_program, equation.inner_programs)]
        equations.append((equation.name, inputs, {} if bodies else params, bodies))
        numbers |= {x: len(numbers) + i for i, x in enumerate(equation.outputs)}
    return equations, [numbers.get(x, x.constant) for x in program.outputs]


def digest(tree: PyTree) -> str:
    """Returns a digest of arrays, numbers, text and objects: equal in every process.

    An array counts by its bytes, and one of `open_checkpoint` by the name, the size and the time of
    its file; a function by its name, its defaults and what it encloses; an object by its class and
    attributes.

    Example:
      >>> digest({"a": np.ones(3)}) == digest({"a": np.ones(3)})
      True
    """
    return _digest(tree, ()).hex()


def _digest(x: PyTree, outer: tuple[int, ...]) -> bytes:
    """Returns the digest of a value; `outer` are the ids of what holds it."""
    kind, parts, text = type(x), list[PyTree](), ""
    if trees.is_array(x):
        text, parts = f"{x.dtype}{tuple(x.shape)}", [_read_content(x)]
    elif x is None or isinstance(x, str | bytes | int | float | complex | np.dtype):
        text = repr(x)
    elif isinstance(x, Mapping):
        parts = [*x.items()]
    elif isinstance(x, set | frozenset):
        parts = sorted(_digest(item, outer) for item in x)
    elif isinstance(x, list | tuple):
        parts = [*x]
    elif isinstance(x, functools.partial):
        parts = [x.func, x.args, x.keywords]
    elif isinstance(x, types.MethodType):
        parts = [x.__func__, x.__self__]
    elif callable(x) and hasattr(x, "__qualname__"):
        text = f"{x.__module__}.{x.__qualname__}"
        function = getattr(x, "__wrapped__", x)
        enclosed = (
            inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        )
        parts = [
            getattr(function, "__defaults__", None),
            getattr(function, "__kwdefaults__", None),
            enclosed,
        ]
    elif id(x) not in outer:
        parts = sorted(getattr(x, "__dict__", {}).items())
    digester = hashlib.blake2b(f"{kind.__module__}.{kind.__qualname__} {text}".encode())
    if id(x) not in outer:  # not within itself
        for part in parts:
            inner = part if isinstance(part, bytes) else _digest(part, (*outer, id(x)))
            digester.update(inner)
    return digester.digest()[:16]


def _read_content(array: PyTree) -> bytes:
    """Returns the digest of the entries of an array."""
    if isinstance(array, LazyArray) and array.stamp is not None:
        return array.stamp.encode()
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array, order="C")
    if not trees.is_numeric(values):
        raise ValueError(f"An array of {values.dtype} cannot be told from others: {values!r}.")
    return hashlib.blake2b(values.reshape(-1).view(np.uint8).data).digest()
