"""Groups of channels, from the axes of a model's leaves, and what keeps the other axes whole."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence

import chex
import numpy as np

from sparsity.core.trees import KeyPath
from sparsity.graph.uses import Path
from sparsity.programs.axes import Axis, Reason, labels, variables


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: its path, shape and dtype."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def name(self) -> str:
        return "/".join(self.path) or "params"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Channels that live and die together: removing one leaves the function that masking it gives.

    Attributes:
      name: the leaf and the axis that make them.
      size: number of channels.
      members: (path, axis) of all that goes with a channel.
      positions: for each member int[size, n]: where each channel lies along its axis.
      variable: the axis itself.
      layers: of a scan, where each of them may keep channels of its own: their stacked axis is the
        first one of every member. 0: the same channels everywhere.
    """

    name: str
    size: int
    members: tuple[tuple[Path, int], ...]
    positions: tuple[np.ndarray, ...]
    variable: Axis = dataclasses.field(repr=False)
    layers: int = 0


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """A group as it lies in a tree.

    Attributes:
      channels: the group.
      whole: the same before the model was shrunken.
      members: (path, axis, positions) of all that goes with a channel.
      scored: of those that add to its importance.
      entries: how many entries of each of these make a channel of `whole`, in a layer.
      sparsity: of the group.
    """

    channels: ChannelGroup
    whole: ChannelGroup
    members: list[tuple[KeyPath, int, np.ndarray]]
    scored: list[tuple[KeyPath, int, np.ndarray]]
    entries: list[int]
    sparsity: chex.Numeric


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An axis of a leaf that cannot lose entries, and why.

    Attributes:
      path: of the leaf.
      axis: the axis.
      primitive: what needs all of its entries: a primitive, or 'input', 'output' or 'state' of the
        model; 'unread' if nothing reads the leaf, 'axis' if its entries cannot be told apart.
      source: the line of the model.
      reason: in words.
    """

    path: Path
    axis: int
    primitive: str
    source: str
    reason: str


def find_channels(
    axes: Sequence[tuple[Leaf, Sequence[Axis]]],
    unproven: Mapping[Axis, Reason],
    made: Mapping[Path, set[int]],
    layers: Mapping[Axis, int],
) -> tuple[list[ChannelGroup], list[Refusal]]:
    """The groups that can be removed, and the axes that cannot lose entries, both in tree order.

    Args:
      axes: the leaves with their axes.
      unproven: variables whose removal would differ from masking them, and why.
      made: of each leaf the axes that become outputs of a product.
      layers: variables of which each layer has entries of its own, and how many layers.
    """
    refusals = dict(unproven)
    members: dict[Axis, list[tuple[Leaf, int, Axis]]] = {}
    for leaf, dims in axes:
        for axis, dim in enumerate(dims):
            found = dict.fromkeys(variables(dim))
            is_single = leaf.shape[axis] > 1 and all(variable.size == 1 for variable in found)
            for variable in found:
                if variable.pin is not None:
                    refusals[variable] = variable.pin
                elif variable not in refusals and labels(dim, variable) is None:
                    refusals[variable] = Reason(None, "an axis of pairs of its own entries", "axis")
                elif variable not in refusals and is_single:
                    refusals[variable] = Reason(
                        None, "an axis that is cut into single entries", "axis"
                    )
                if variable.size > 1 or is_single:
                    members.setdefault(variable, []).append((leaf, axis, dim))
    groups, refused = [], []
    names: dict[str, int] = {}
    for variable, places in members.items():
        if variable in refusals:
            refused += [_refusal(leaf, axis, refusals[variable]) for leaf, axis, _ in places]
            continue
        of_output = [place for place in places if place[1] in made.get(place[0].path, ())]
        leaf, axis, _ = (of_output or places)[0]
        name = f"{leaf.name}:{axis}"
        names[name] = names.get(name, 0) + 1
        groups.append(
            ChannelGroup(
                name if names[name] == 1 else f"{name}.{names[name]}",
                variable.size,
                tuple((leaf.path, axis) for leaf, axis, _ in places),
                tuple(positions(dim, variable) for _, _, dim in places),
                variable,
                layers.get(variable, 0),
            )
        )
    return groups, list(dict.fromkeys(refused))


def positions(
    dim: Axis, variable: Axis, sizes: Mapping[Axis, int] = types.MappingProxyType({})
) -> np.ndarray:
    """int[size, n]: where each entry of a variable lies along an axis, at sizes that are left."""
    entries = labels(dim, variable, sizes)
    assert entries is not None  # refused before
    order = np.argsort(entries, kind="stable")[np.count_nonzero(entries < 0) :]
    return order.reshape(sizes.get(variable, variable.size), -1)


def _refusal(leaf: Leaf, axis: int, reason: Reason) -> Refusal:
    equation = reason.equation
    primitive = reason.kind if equation is None else equation.name
    source = "" if equation is None else equation.source
    return Refusal(leaf.path, axis, primitive, source, reason.text)
