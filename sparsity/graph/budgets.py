"""Budgets: how sparse each leaf becomes, such that what is left costs no more than is allowed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import check_density
from sparsity.core.exact import num_kept
from sparsity.core.polynomials import Polynomial
from sparsity.core.trees import PyTree
from sparsity.graph.channels import Leaf
from sparsity.graph.coupled import Coupled
from sparsity.graph.graph import Graph
from sparsity.masks import BatchAxes, Overrides, Pattern, Sites
from sparsity.patterns import SparsityType, Unstructured
from sparsity.sparsity_distributions import Uniform

# The bits of sparsities are ordered as these; smaller ones than these are rounded to 0.
_LOWEST, _HIGHEST = (int(np.float32(x).view(np.int32)) for x in (np.finfo(np.float32).tiny, 1))


@dataclasses.dataclass(frozen=True)
class Budget:
    """A distribution whose masks leave a part of a model's cost. Made by `budget`.

    Attributes:
      graph: the graph of the model.
      macs: the part of its multiply-adds that is left, `None` for a budget of bytes.
      nbytes: the part of its bytes that is left, `None` for a budget of multiply-adds.
      distribution: how the sparsities relate: its own sparsity is what the budget decides.
    """

    graph: Graph
    macs: float | None
    nbytes: float | None
    distribution: Uniform

    @property
    def custom_sparsity_map(self) -> Overrides | None:
        """Sparsities of single parameters, from the distribution."""
        return self.distribution.custom_sparsity_map

    def cost(self, path: tuple[str, ...], param: chex.Array) -> float:
        """What a weight of a leaf costs: multiply-adds, or bytes."""
        leaf = self.graph.leaf(path, param, may_be_smaller=True)
        if self.macs is None:
            return float(leaf.dtype.itemsize)
        return self.graph.macs_of(leaf.path) / max(leaf.size, 1)

    def total(self, leaves: Sequence[tuple[tuple[str, ...], chex.Array]]) -> Polynomial:
        """What masks of some leaves cost, in the numbers of weights that they keep."""
        known = [self.graph.leaf(path, param, may_be_smaller=True) for path, param in leaves]
        kept = {leaf.path: Polynomial.variable(i) for i, leaf in enumerate(known)}
        if self.macs is None:
            return sum((kept[leaf.path] * leaf.dtype.itemsize for leaf in known), Polynomial({}))
        shares = {leaf.path: kept[leaf.path] / leaf.size for leaf in known if leaf.size}
        return Polynomial.convert(self.graph.cost(shares))

    def __call__(
        self,
        params: PyTree,
        batch_axes: BatchAxes = 0,
        sites: Sites | None = None,
        scope: object = None,
    ) -> PyTree:
        """Returns a tree like `params` of sparsities, `None` where a parameter stays dense.

        Args:
          params: tree of parameters.
          batch_axes: those of the updater.
          sites: its table, with patterns; by default weights are removed one by one.
          scope: its scope; of `Coupled` the cost is that of the smaller arrays.

        Raises:
          ValueError: even without any of the selected weights the model costs more.
        """
        by_bytes = self.macs is None
        name, share = ("nbytes", self.nbytes) if by_bytes else ("macs", self.macs)
        assert share is not None  # one of them is given
        if isinstance(scope, Coupled) and scope.across and (scope.across == "nbytes") != by_bytes:
            raise ValueError(
                f"across = {scope.across!r} keeps what all groups cost, but not the {name} of "
                f"this budget. Use across = {'nbytes' if by_bytes else True!r}."
            )
        table = Sites(params, Unstructured(), batch_axes) if sites is None else sites
        leaves = self.graph.leaves_of(params)
        arrays = trees.leaves_by_path(params)
        dense = self._cost(leaves, {})
        allowed = Fraction(share) * dense

        def spread(sparsity: float) -> PyTree:
            own = dataclasses.replace(self.distribution, sparsity=sparsity)
            return own(params, batch_axes)

        paths = {leaf.path for leaf in leaves.values()}
        is_whole = by_bytes or isinstance(self.graph.macs_left({}), int)

        def cost_of(targets: PyTree) -> Fraction:
            if isinstance(scope, Coupled):
                left, graph = scope.left(params, targets), self.graph
                smaller = graph.bytes_left(left, paths) if by_bytes else graph.macs_left(left)
                # Between whole numbers of channels there are costs that none has, if all are whole.
                return Fraction(math.floor(smaller)) if scope.across and is_whole else smaller
            kept = {
                path: _kept_by(
                    table[path].pattern, arrays[path].shape, table[path].batch_axes, float(target)
                )
                for path, target in trees.leaves_by_path(targets).items()
            }
            return self._cost(leaves, kept)

        def cost(sparsity: float) -> Fraction:
            return cost_of(spread(sparsity))

        if cost(1.0) > allowed:
            least = float(cost(1.0) / dense)
            fewest = "without any of the weights that the distribution selects"
            if isinstance(scope, Coupled):
                fewest = "with the fewest channels that may stay"
            raise ValueError(
                f"budget({name}={share}) cannot be met: {fewest}, "
                f"{math.ceil(least * 1e4) / 1e4} of the cost is left. Select more leaves, or allow "
                "more."
            )
        low, high = _LOWEST - 1, _HIGHEST  # the lowest sparsity that costs no more, by its bits
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if cost(_float(middle)) <= allowed else (middle + 1, high)
        found = spread(_float(low))
        if low >= _LOWEST:  # what is left of the budget serves leaf by leaf
            for path, lower in trees.leaves_by_path(spread(_float(low - 1))).items():
                more = _with(found, path, lower)
                found = more if cost_of(more) <= allowed else found
        return trees.map_matched(  # of patterns with a density of their own, that density
            lambda path, x: table[path].pattern.final_sparsity(x), found
        )

    def _cost(
        self, leaves: Mapping[trees.KeyPath, Leaf], kept: Mapping[trees.KeyPath, int]
    ) -> Fraction:
        """The cost if of some leaves only so many weights are left, under masks."""
        if self.macs is not None:
            each = ((leaves[path], n) for path, n in kept.items())
            macs: Fraction = self.graph.cost({x.path: Fraction(n, x.size) for x, n in each})
            return macs
        nbytes = [
            kept[path] * leaf.dtype.itemsize + math.ceil(leaf.size / 8)
            if path in kept
            else leaf.size * leaf.dtype.itemsize
            for path, leaf in leaves.items()
        ]
        return Fraction(sum(nbytes))


def budget(
    graph: Graph,
    macs: float | None = None,
    nbytes: float | None = None,
    distribution: Uniform | None = None,
) -> Budget:
    """A distribution whose masks leave a given part of a model's cost, and never more.

    Under a `Global` scope weights are then ranked by score per multiply-add.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      macs: the part of the model's multiply-adds that may be left, in (0, 1]; dots and convolutions
        count, those that read no parameter, too.
      nbytes: the part of the parameters' bytes that may be left, in (0, 1]: kept values, and a bit
        for each weight of a leaf with a mask.
      distribution: `Uniform()` or `ERK()`, without a sparsity: filter, overrides and power of the
        spread. Its filter is `graph.is_weight` unless it has one.

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
    given = [(name, x) for name, x in (("macs", macs), ("nbytes", nbytes)) if x is not None]
    if len(given) != 1:
        raise ValueError(f"Give one of macs and nbytes, got macs = {macs}, nbytes = {nbytes}.")
    check_density(*given[0])
    macs, nbytes = (None if x is None else float(x) for x in (macs, nbytes))
    distribution = Uniform() if distribution is None else distribution
    if distribution.filter_fn is None:
        distribution = dataclasses.replace(distribution, filter_fn=graph.is_weight)
    if distribution.sparsity is not None:
        raise ValueError(
            f"The budget decides the sparsity: give {type(distribution).__name__}() without one, "
            f"got sparsity = {distribution.sparsity}."
        )
    return Budget(graph, macs, nbytes, distribution)


def _with(targets: PyTree, path: trees.KeyPath, target: float) -> PyTree:
    return trees.map_matched(lambda at, known: target if at == path else known, targets)


def _float(bits: int) -> float:
    return float(np.int32(bits).view(np.float32)) if bits >= _LOWEST else 0.0


def _kept_by(pattern: Pattern, shape: tuple[int, ...], batch_axes: int, sparsity: float) -> int:
    """How many weights a mask of that sparsity keeps, at most."""
    slices, size = math.prod(shape[:batch_axes]), math.prod(shape[batch_axes:])
    if pattern.is_elementwise:
        return slices * _num_kept(size, sparsity)
    if not (isinstance(pattern, SparsityType) and pattern.ranks_units):
        return math.ceil(slices * size * (1 - Fraction(pattern.final_sparsity(sparsity))))
    units, entries = _units(pattern, shape, batch_axes)
    return slices * min(size, _num_kept(units, sparsity) * entries)


def _num_kept(n: int, sparsity: float) -> int:
    kept = num_kept(n, sparsity)
    assert isinstance(kept, int)  # of Python numbers
    return kept


@functools.lru_cache
def _units(pattern: SparsityType, shape: tuple[int, ...], batch_axes: int) -> tuple[int, int]:
    """Returns the units of a group, and the entries of the first, full unit of all groups."""
    scores = jax.ShapeDtypeStruct(shape, np.float32)
    units = jax.eval_shape(lambda scores: pattern.pool(scores, batch_axes), scores).shape
    first = np.zeros(units, np.uint8)
    leading = batch_axes + pattern.group_axes
    first[(0,) * batch_axes + (slice(None),) * pattern.group_axes + (0,) * len(units[leading:])] = 1
    with jax.ensure_compile_time_eval():
        entries = np.count_nonzero(pattern.expand(jnp.asarray(first), shape, batch_axes))
    return math.prod(units[leading:]), int(entries)
