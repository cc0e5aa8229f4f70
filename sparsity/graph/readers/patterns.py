"""Filters and patterns by the inputs that the products of each parameter contract."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import chex

from sparsity.core import trees
from sparsity.core.checks import check_int
from sparsity.core.trees import Path
from sparsity.graph.readers.uses import Tracker, Use
from sparsity.graph.traced_model import Parameters
from sparsity.patterns import FanIn, NByM, SparsityType, Unstructured


class _GraphQueries(Protocol):
    """The parts of a `Graph` that filters and patterns read."""

    parameters: Parameters
    tracker: Tracker


@dataclasses.dataclass(frozen=True)
class WeightFilter:
    """`filter_fn` that selects the weights with enough inputs. Made by `Graph.is_weight`.

    Attributes:
      graph: the graph of the model.
      min_inputs: smallest number of inputs of an output.
    """

    graph: _GraphQueries
    min_inputs: int

    def __post_init__(self) -> None:
        check_int("min_inputs", self.min_inputs, 1)

    def __call__(self, path: Path, param: chex.Array) -> bool:
        """Returns whether a product has enough inputs for each output, before the model was cut."""
        uses = _find_contractions(self.graph, path, param)
        return any(use.num_inputs >= self.min_inputs for use in uses)


@dataclasses.dataclass(frozen=True)
class _InputPatterns(abc.ABC):
    """`sparsity_type` along the inputs of each parameter.

    Attributes:
      graph: the graph of the model.
      otherwise: "dense" keeps parameters dense that cannot have the pattern.
    """

    graph: _GraphQueries
    otherwise: Literal["dense"] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.otherwise not in (None, "dense"):
            raise ValueError(
                f"otherwise must be None or 'dense', got otherwise = {self.otherwise!r}."
            )

    def __call__(self, path: Path, param: chex.Array) -> SparsityType | None:
        """Returns the pattern of a parameter, in this model or in a smaller one."""
        uses = _find_contractions(self.graph, path, param)
        if not uses:
            return None if self.otherwise == "dense" else Unstructured()
        axes = {self._read_axes(use) for use in uses}
        pattern = self._fit(uses, next(iter(axes)), param.shape) if len(axes) == 1 else None
        if pattern is None:
            reason = f"Products contract different axes {sorted(axes)}"
            pattern = f"{reason} of {{parameter}}, so that no axes serve it."
        if not isinstance(pattern, str) or self.otherwise == "dense":
            return None if isinstance(pattern, str) else pattern
        name = f"{trees.join_names(uses[0].path)!r} of shape {param.shape}"
        raise ValueError(
            f"{pattern.format(parameter=name)} Leave it out with filter_fn, or keep all such "
            "parameters dense: otherwise='dense'."
        )

    @abc.abstractmethod
    def _read_axes(self, use: Use) -> tuple[int, ...]:
        """Returns the axes of the parameter along which a product could have the pattern."""

    @abc.abstractmethod
    def _fit(
        self, uses: Sequence[Use], axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> SparsityType | str:
        """Returns the pattern, or the reason why a parameter cannot have the pattern.

        Axes of patterns count from the end: they are the same in a slice, whatever the batch axes.
        """


@dataclasses.dataclass(frozen=True)
class NByMAlongInputs(_InputPatterns):
    """N:M along the contracted axis of each parameter. Made by `Graph.nm`.

    Attributes:
      n: number of weights kept of m consecutive ones.
      m: group size.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        super().__post_init__()
        NByM(self.n, self.m)  # checks n and m

    def _read_axes(self, use: Use) -> tuple[int, ...]:
        return use.channels

    def _fit(
        self, uses: Sequence[Use], axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> SparsityType | str:
        divided = [axis for axis in axes if shape[axis] % self.m == 0]
        fitting = [axis for axis in divided if all(use.is_along(axis, self.m) for use in uses)]
        if fitting:
            return NByM(self.n, self.m, axis=fitting[-1] - len(shape))
        sizes = ", ".join(f"axis {axis} of size {shape[axis]}" for axis in axes)
        reason = f"{self.m} divides none of the input channels of {{parameter}}: {sizes}"
        if divided:
            reason = f"Groups of {self.m} input channels of {{parameter}} ({sizes}) lie across a "
            reason += "reshape"
        return f"{reason}. The window of a convolution holds no input channels. Choose another m."


@dataclasses.dataclass(frozen=True)
class FanInAlongInputs(_InputPatterns):
    """`FanIn` along the axes that the products of each parameter contract. Made by `Graph.fan_in`.

    Attributes:
      group: neighbouring outputs that read the same inputs.
    """

    group: int

    def __post_init__(self) -> None:
        super().__post_init__()
        FanIn(self.group)  # checks the group

    def _read_axes(self, use: Use) -> tuple[int, ...]:
        return tuple(sorted(use.contracting))

    def _fit(
        self, uses: Sequence[Use], axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> SparsityType | str:
        full_shape = self.graph.parameters.find_shape(uses[0].path)
        for axis in axes:
            if not all(use.is_along(axis, full_shape[axis]) for use in uses):
                return (
                    f"Products contract a part of axis {axis} of {{parameter}}, which a reshape "
                    "took apart."
                )
        return FanIn(self.group, tuple(axis - len(shape) for axis in axes))


def _find_contractions(graph: _GraphQueries, path: Path, param: chex.Array) -> list[Use]:
    """Returns the products that contract a parameter of this model, or of a smaller one."""
    parameter = graph.parameters.find(path, param, may_be_smaller=True)
    return [use for use in graph.tracker.find_products(parameter.path) if use.contracting]
