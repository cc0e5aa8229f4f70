"""Filters and patterns by the inputs that the products of each parameter contract."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

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


class _Unfit(NamedTuple):
    """The reason why a parameter cannot have a pattern."""

    reason: str


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
        description = f"{trees.join_names(uses[0].path)!r} of shape {param.shape}"
        pattern = self._fit(uses, description, param.shape)
        if not isinstance(pattern, _Unfit):
            return pattern
        if self.otherwise == "dense":
            return None
        raise ValueError(
            f"{pattern.reason} Leave it out with filter_fn, or keep all such parameters dense: "
            "otherwise='dense'."
        )

    @abc.abstractmethod
    def _fit(
        self, uses: Sequence[Use], description: str, shape: tuple[int, ...]
    ) -> SparsityType | _Unfit:
        """Returns the pattern, or the reason why a parameter cannot have the pattern."""


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

    def _fit(
        self, uses: Sequence[Use], description: str, shape: tuple[int, ...]
    ) -> SparsityType | _Unfit:
        axes = {use.channels for use in uses}
        if len(axes) > 1:
            return _explain_axes(axes, description, "no axis serves N:M")
        (channels,) = axes
        sizes = ", ".join(f"axis {axis} of size {shape[axis]}" for axis in channels)
        divided = [axis for axis in channels if shape[axis] % self.m == 0]
        fitting = [axis for axis in divided if all(use.is_along(axis, self.m) for use in uses)]
        if fitting:
            # Counted from the end, the axis is the same in a slice, whatever the batch axes.
            return NByM(self.n, self.m, axis=fitting[-1] - len(shape))
        reason = f"{self.m} divides none of the input channels of {description}: {sizes}"
        if divided:
            reason = (
                f"Groups of {self.m} input channels of {description} ({sizes}) lie across a reshape"
            )
        return _Unfit(
            f"{reason}. The window of a convolution holds no input channels. Choose another m."
        )


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

    def _fit(
        self, uses: Sequence[Use], description: str, shape: tuple[int, ...]
    ) -> SparsityType | _Unfit:
        axes = {tuple(sorted(use.contracting)) for use in uses}
        if len(axes) > 1:
            return _explain_axes(axes, description, "no axes serve FanIn")
        (inputs,) = axes
        for axis in inputs:
            full = self.graph.parameters.find_shape(uses[0].path)[axis]
            if not all(use.is_along(axis, full) for use in uses):
                return _Unfit(
                    f"Products contract a part of axis {axis} of {description}, which a reshape "
                    "took apart, so that no axes serve FanIn."
                )
        # Counted from the end, the axes are the same in a slice, whatever the batch axes.
        return FanIn(self.group, tuple(axis - len(shape) for axis in inputs))


def _find_contractions(graph: _GraphQueries, path: Path, param: chex.Array) -> list[Use]:
    """Returns the products that contract a parameter of this model, or of a smaller one."""
    parameter = graph.parameters.find(path, param, may_be_smaller=True)
    return [use for use in graph.tracker.find_products(parameter.path) if use.contracting]


def _explain_axes(axes: set[tuple[int, ...]], description: str, failure: str) -> _Unfit:
    """Returns the reason of products that contract different axes of a parameter."""
    return _Unfit(
        f"Products contract different axes {sorted(axes)} of {description}, so that {failure}."
    )
