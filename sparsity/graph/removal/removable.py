"""Removal of channels: coupled axes, and proofs that the channels may go."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from sparsity.core.trees import Path
from sparsity.graph.channels.coupling import Coupling
from sparsity.graph.channels.groups import Channels, find_channels
from sparsity.graph.channels.layered import find_layered
from sparsity.graph.readers.uses import Use
from sparsity.graph.removal.alike import Alike
from sparsity.graph.removal.proof import Proof
from sparsity.graph.traced_model import Model, Parameter
from sparsity.programs.axes import Axis, Reason, list_variables
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation, values_read


class Proven(NamedTuple):
    """The result of a proof, without the facts from which the result follows."""

    refused: dict[Axis, Reason]
    alike: dict[Equation, Alike]


class Removal:
    """Channels that can be removed from a model; computed when first asked for.

    Args:
      model: the model.
      uses: the products, convolutions and lookups that read parameters.
    """

    def __init__(self, model: Model, uses: Sequence[Use]) -> None:
        self._model, self._uses = model, uses
        self._proofs: dict[frozenset[tuple[object, ...]], Proven] = {}

    def list_members(self) -> set[tuple[Path, int]]:
        """Returns (path, axis) of all axes of parameters that can lose channels."""
        return {member for group in self.channels.groups for member in group.members}

    def list_axes(self) -> list[tuple[Parameter, list[Axis]]]:
        """Returns the parameters with their axes."""
        axes = map(self.coupling.axes, self._model.values)
        return list(zip(self._model.leaves, axes, strict=True))

    @functools.cached_property
    def coupling(self) -> Coupling:
        """The axes of all values of the program."""
        read_values = values_read(self._model.program)
        coupling = Coupling(self._model.program, self._model.values, self._model.carried)
        for value in self._model.values:
            if value not in read_values:
                coupling.pin(value, Reason(None, "no operation reads it", "unread"))
        return coupling

    def find_unproven(
        self, masked: Mapping[Path, Collection[tuple[int, Axis]]]
    ) -> dict[Axis, Reason]:
        """Returns the variables whose removal differs from masking, and why.

        Each variable is proven by itself: masked entries of one tell nothing of another.

        Args:
          masked: {path: (axis, variable) of all removed entries at which the parameter is 0}.
        """
        return self._prove(masked).refused

    @property
    def alike(self) -> dict[Equation, Alike]:
        """{sum along channels: the entry that removed channels share}, which a cut model adds."""
        return self._prove(self._maskable).alike

    def _prove(self, masked: Mapping[Path, Collection[tuple[int, Axis]]]) -> Proven:
        """Returns what a proof tells of channels whose entries are 0 where they are removed."""
        key = frozenset((path, *entry) for path, entries in masked.items() for entry in entries)
        if key not in self._proofs:
            paths = {value: self._model.leaves[i].path for value, i in self._model.values.items()}
            entries = {value: masked[path] for value, path in paths.items() if path in masked}
            proof = Proof(self._model.program, self.coupling, entries)
            self._proofs[key] = Proven(proof.refused, proof.alike)
        return self._proofs[key]

    @functools.cached_property
    def updated_state(self) -> set[Path]:
        """Paths of the parameters that a call replaces, so that no mask holds."""
        inputs, outputs = self._model.program.inputs, self._model.program.outputs
        pairs = self._model.carried.items()
        return {self._model.leaves[i].path for out, i in pairs if outputs[out] is not inputs[i]}

    @functools.cached_property
    def _maskable(self) -> dict[Path, set[tuple[int, Axis]]]:
        """Entries that masking all channels sets to 0, as `find_unproven` takes them."""
        return {
            parameter.path: {(i, v) for i, axis in enumerate(axes) for v in list_variables(axis)}
            for parameter, axes in self.list_axes()
            if parameter.path not in self.updated_state
            and jnp.issubdtype(parameter.dtype, jnp.inexact)
        }

    @functools.cached_property
    def channels(self) -> Channels:
        """The channels that can be removed, and the axes that have none."""
        made: dict[Path, set[int]] = {}
        windows: dict[Path, set[int]] = {}
        for use in self._uses:
            if use.primitive in PRODUCTS:
                made.setdefault(use.path, set()).update(use.output)
                windows.setdefault(use.path, set()).update({*use.contracting} - {*use.channels})
        layers = find_layered(self._model.program, self.coupling)
        unproven = self.find_unproven(self._maskable)
        return find_channels(self.list_axes(), unproven, made, windows, layers)
