"""The finished layers of a one-shot run, in a folder: an interrupted run goes on from there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.report import LayerReport
from sparsity.core import extras, trees
from sparsity.core.jaxprs import Program
from sparsity.core.trees import PyTree


class Layer(NamedTuple):
    """A leaf or one layer of it: pruned weights, their mask, and what pruning did."""

    weights: jax.Array
    mask: jax.Array
    report: LayerReport


class Finished:
    """The layers that a run has finished, by their number in its order.

    Args:
      folder: it is made if need be.
      identity: what the run's results depend on, by name.

    Raises:
      ValueError: the folder holds something else, or there are several processes.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, str]) -> None:
        self._folder = pathlib.Path(folder).absolute()
        self._checkpoints = extras.load("orbax.checkpoint", "resume")
        if jax.process_count() > 1:
            raise ValueError(f"folder = {folder} serves one process, and there are several.")
        about = self._folder / "run.json"
        if not about.exists():
            if self._folder.exists() and any(x != _new(about) for x in self._folder.iterdir()):
                raise ValueError(f"folder = {folder} holds other files. Give a new or empty one.")
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(about, json.dumps(identity, indent=2))
        before = json.loads(about.read_text(encoding="utf-8"))
        names = before | identity
        if differ := [name for name in names if before.get(name) != identity.get(name)]:
            raise ValueError(
                f"folder = {folder} holds another run: its {trees.listed(differ)} differ. Give "
                "another folder, or delete this one to start afresh."
            )

    def read(self, number: int, like: jax.Array) -> Layer | None:
        """Returns a layer, or `None` if it is not finished; its arrays are placed as `like`."""
        path = self._folder / str(number)
        if not path.exists():
            return None
        shape = _tree(Layer(like, like.astype(np.uint8), LayerReport(0.0, 0.0, 0.0, 0, 0.0)))
        how = self._checkpoints.checkpoint_utils.construct_restore_args(shape)
        with self._checkpoints.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(path, item=shape, restore_args=how)
        return Layer(found["weights"], found["mask"], LayerReport(**found["report"]))

    def write(self, number: int, layer: Layer) -> None:
        """Saves a layer; a kill leaves it whole or not there at all."""
        with self._checkpoints.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(self._folder / str(number), _tree(layer))


def _tree(layer: Layer) -> dict[str, Any]:
    return layer._asdict() | {"report": dataclasses.asdict(layer.report)}


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file as a whole."""
    _new(path).write_text(text, encoding="utf-8")
    _new(path).replace(path)


def _new(path: pathlib.Path) -> pathlib.Path:
    """Where a file is written before it is whole."""
    return path.with_suffix(".new")


def digest(tree: PyTree) -> str:
    """A hash of all arrays of a tree, with their shapes and dtypes."""
    found = hashlib.sha256()
    for array in trees.split_arrays(tree)[0]:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(jax.device_get(array)).tobytes())
    return found.hexdigest()


def digest_of_program(program: Program) -> str:
    """A hash of a program: its primitives, the shapes that they read, and its constants."""
    return hashlib.sha256("\n".join(_texts(program)).encode()).hexdigest()


def _texts(program: Program) -> Iterator[str]:
    for equation in program.flat():
        known = [value.known for value in equation.inputs if value.known is not None]
        yield f"{equation.name} {[(x.shape, x.dtype) for x in equation.inputs]} {digest(known)}"
        for body in equation.bodies:
            yield from _texts(body)


def described(value: object) -> str:
    """What a pruner or a refit is, by its class and those of its fields that are plain values."""
    if not dataclasses.is_dataclass(value):
        return type(value).__qualname__
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    plain = {
        name: digest(field) if trees.is_array(field) else field
        for name, field in fields.items()
        if trees.is_array(field) or isinstance(field, bool | int | float | str | None)
    }
    return f"{type(value).__qualname__}({plain})"
