"""Budgets: sparsities of all parameters, such that the cost of the model stays within a limit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import chex
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import check_density, check_kind, check_values
from sparsity.core.trees import KeyPath, Params, Path, PyTree, Sparsities
from sparsity.graph.coupled import Coupled
from sparsity.graph.graph import Graph
from sparsity.graph.traced_model import Parameter
from sparsity.masks import BatchAxes, MaskBudget, Overrides, Sites
from sparsity.masks.budgets import Cost
from sparsity.masks.distributions import FilterFn, Uniform, kept_counter
from sparsity.patterns import Unstructured
from sparsity.patterns.base import read_final_sparsity
from sparsity.programs.axes import Variable
from sparsity.selection import lowest_sparsity


@dataclasses.dataclass(frozen=True)
class Budget(MaskBudget):
    """Distribution whose masks leave a part of a model's cost. Made by `budget`.

    Attributes:
      graph: the graph of the model.
      quantity: "macs" for a budget of multiply-adds, "nbytes" for a budget of bytes.
      share: the fraction of this cost that may remain.
      distribution: the relation between the sparsities; the budget decides the sparsity itself.
    """

    graph: Graph
    quantity: Literal["macs", "nbytes"]
    share: float
    distribution: Uniform

    @property
    def custom_sparsity_map(self) -> Overrides | None:
        """Sparsities of single parameters, from the distribution."""
        return self.distribution.custom_sparsity_map

    @property
    def filter_fn(self) -> FilterFn | None:
        """The filter of the user; `None` for the default, `graph.is_weight`."""
        return self.distribution.filter_fn

    def cost(self, path: Path, param: chex.Array) -> float:
        """Returns the cost of a weight of a parameter: multiply-adds, or bytes."""
        parameter = self.graph.parameters.find(path, param, may_be_smaller=True)
        if self.quantity == "nbytes":
            return float(parameter.dtype.itemsize)
        return self.graph.costs.count_macs(parameter.path) / max(parameter.size, 1)

    def total(self, leaves: Sequence[tuple[Path, chex.Array]]) -> Cost:
        """Returns the cost of some parameters in the numbers of weights kept."""
        parameters = [self.graph.parameters.find(*x, may_be_smaller=True) for x in leaves]
        num_kept = [Cost.variable(i) for i in range(len(parameters))]
        pairs = zip(parameters, num_kept, strict=True)
        if self.quantity == "nbytes":
            return sum((n * x.dtype.itemsize for x, n in pairs), Cost({}))
        densities = {x.path: n * Fraction(1, x.size) for x, n in pairs if x.size}
        return Cost.convert(self.graph.costs.count_sparse_macs(densities))

    def __call__(
        self,
        params: Params,
        batch_axes: BatchAxes = 0,
        sites: Sites | None = None,
        scope: object = None,
    ) -> Sparsities:
        """Returns a tree like `params` of sparsities, `None` where a parameter stays dense.

        Args:
          params: tree of parameters.
          batch_axes: the batch axes of the updater.
          sites: the sites of the updater, with patterns; by default weights are removed one by one.
          scope: the scope of the updater; with `Coupled` smaller arrays are counted.

        Raises:
          ValueError: even with the sparsest masks, or the fewest channels, the model costs more.
        """
        has_filter, overrides = self.filter_fn is not None, self.custom_sparsity_map
        pattern = Unstructured()
        sites = sites or Sites(params, pattern, batch_axes, overrides, has_user_filter=has_filter)
        leaves = self.graph.parameters.match(params)
        count: Callable[[Sparsities], Fraction]
        if isinstance(scope, Coupled):
            fewest = "the fewest channels that may stay"
            count = self._make_channel_counter(scope.bind(sites, None), params)
        else:
            fewest = "the sparsest masks of its patterns"
            count = functools.partial(self._count_masked, leaves, kept_counter(params, sites))
        dense = self._count_masked(leaves, lambda _: {}, None)
        allowed = Fraction(self.share) * dense

        def compute_targets(sparsity: float) -> PyTree:
            filter_fn, chosen = self.filter_fn or self.graph.is_weight, self.distribution
            chosen = dataclasses.replace(chosen, sparsity=sparsity, filter_fn=filter_fn)
            return chosen(params, batch_axes, sites)

        if (cost := count(compute_targets(1.0))) > allowed:
            raise ValueError(
                f"budget({self.quantity}={self.share}) cannot be met: {fewest} leave "
                f"{math.ceil(float(cost / dense) * 1e4) / 1e4} of the cost. "
                "Select more parameters, or allow more."
            )
        lowest = lowest_sparsity(lambda sparsity: count(compute_targets(sparsity)) <= allowed)
        targets = compute_targets(lowest)
        if lowest:  # the remaining budget serves one parameter after the other
            previous = np.nextafter(np.float32(lowest), np.float32(0))
            lower_sparsity = float(previous) if previous >= np.finfo(np.float32).tiny else 0.0
            lower_targets = trees.leaves_by_path(compute_targets(lower_sparsity))
            for key_path, target in lower_targets.items():
                replaced = {**trees.leaves_by_path(targets), key_path: target}
                raised = trees.map_matched(lambda path, _, by=replaced: by[path], targets)
                targets = raised if count(raised) <= allowed else targets

        def read_final(key_path: KeyPath, target: float) -> float:
            final = read_final_sparsity(sites[key_path].pattern, target, sites[key_path].name)
            return target if final is None else final

        return trees.map_matched(read_final, targets)  # some patterns fix the density

    def _make_channel_counter(
        self, scope: Coupled, params: Params
    ) -> Callable[[Sparsities], Fraction]:
        """Returns a function from sparsities to the cost of the smaller arrays.

        Raises:
          ValueError: the scope counts another cost, or channels of another graph.
        """
        across = "nbytes" if self.quantity == "nbytes" else True
        if scope.across not in (False, across):
            raise ValueError(
                f"across = {scope.across!r} counts another cost than the {self.quantity} of this "
                f"budget. Use across = {across!r}."
            )
        if scope.graph is not self.graph:
            raise ValueError(
                f"The budget and Coupled count channels of two graphs, {self.graph!r} and "
                f"{scope.graph!r}. Give both the same result of sparsity.trace."
            )
        paths = {x.path for x in self.graph.parameters.match(params).values()}

        def count_small(sizes: Mapping[Variable, Fraction]) -> Fraction | int:
            if self.quantity == "macs":
                return self.graph.costs.count_small_macs(sizes)
            return self.graph.costs.count_small_bytes(sizes, paths)

        # A fractional number of channels may cost more than the integer below.
        rounds_down = scope.across and isinstance(count_small({}), int)

        def count(targets: Sparsities) -> Fraction:
            cost = count_small(scope.count_channels(params, targets))
            return Fraction(math.floor(cost) if rounds_down else cost)

        return count

    def _count_masked(
        self,
        leaves: Mapping[KeyPath, Parameter],
        count_kept: Callable[[Sparsities], Mapping[KeyPath, int]],
        targets: Sparsities,
    ) -> Fraction:
        """Returns the cost of the masked arrays."""
        num_kept = count_kept(targets)
        if self.quantity == "macs":
            pairs = ((leaves[key_path], n) for key_path, n in num_kept.items())
            density = {x.path: Fraction(n, x.size) for x, n in pairs}
            return Fraction(self.graph.costs.count_sparse_macs(density))
        return Fraction(
            sum(
                num_kept.get(key_path, x.size) * x.dtype.itemsize
                + (math.ceil(x.size / 8) if key_path in num_kept else 0)
                for key_path, x in leaves.items()
            )
        )


def budget(
    graph: Graph,
    macs: float | None = None,
    nbytes: float | None = None,
    distribution: Uniform | None = None,
) -> Budget:
    """Returns a distribution whose masks leave at most a part of a model's cost.

    Under a `Global` scope weights are then ranked by score per multiply-add.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      macs: the part of the model's multiply-adds that may be left, in (0, 1]; all dots and
        convolutions count, also products of activations.
      nbytes: the part of the parameters' bytes that may be left, in (0, 1]: kept values, and a bit
        for each weight of a parameter with a mask.
      distribution: `Uniform()` or `ERK()`, without a sparsity: filter, overrides and power of the
        spread. The default filter is `graph.is_weight`.

    Returns:
      A `sparsity_distribution_fn`.

    Raises:
      ValueError: none or both of the budgets are given, one lies outside (0, 1], or the
        distribution has a sparsity.

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsity.graph import trace
      >>> params = {"up": jnp.ones((4, 80)), "down": jnp.ones((80, 4))}
      >>> model = lambda params, x: x @ params["up"] @ params["down"]
      >>> graph = trace(model, params, jnp.ones((1, 4)))
      >>> budget(graph, macs=0.25)(params)
      {'down': 0.7484375..., 'up': 0.7484375...}
    """
    quantity: Literal["macs", "nbytes"] = "macs" if nbytes is None else "nbytes"
    share = macs if nbytes is None else nbytes
    if share is None or (macs is not None and nbytes is not None):
        raise ValueError(f"Give one of macs and nbytes, got macs = {macs}, nbytes = {nbytes}.")
    check_values(quantity, share, "Make the budget outside of jit.")
    check_density(quantity, share)
    check_kind("graph", graph, Graph, "made by sparsity.trace")
    distribution = Uniform() if distribution is None else distribution
    check_kind("distribution", distribution, Uniform, "Uniform() or ERK()")
    if distribution.sparsity is not None or distribution.entries is not None:
        raise ValueError(
            f"The budget decides the sparsity: give {type(distribution).__name__}() without one, "
            f"got sparsity = {distribution.sparsity}, entries = {distribution.entries}."
        )
    return Budget(graph, quantity, float(share), distribution)
