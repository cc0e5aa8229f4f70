"""The base of patterns: pools scores of entries to units, selects units, expands the mask.

A pattern is a frozen value, checked when it is made. Axes count within a slice: for stacked weights
(`batch_axes`) axis 0 is the first one after the leading axes. A new pattern is one class: `pool`
computes the scores of units from those of entries, `expand` covers the entries of each unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import selection
from sparsity.core import checks, sharding
from sparsity.core.arrays import count, promote, scale_for_sums

REMEDY = (
    "Give another axis, make sparsity_type a function of (path, param), or keep this parameter "
    "dense with filter_fn or custom_sparsity_map={path: None}."
)
ROUNDING = 1e-6  # of sparsities that patterns compute


class SparsityType(checks.DataclassBase):
    """Base of patterns, the units that are kept or removed together; here each entry is a unit.

    A subclass with units of several entries overrides `pool` and `expand`, and `check` if it does
    not fit every shape. All pruners and sparse trainers take the subclass. `select` keeps the best
    units, `move` replaces the worst; a pattern with another rule, such as N:M, overrides both. With
    `group_axes` units compete within groups, and each group keeps equally many.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Rows(SparsityType):
      ...     def pool(self, scores, batch_axes=0):
      ...         return jnp.max(scores, axis=-1)
      ...
      ...     def expand(self, units, shape, batch_axes=0):
      ...         return jnp.broadcast_to(units[..., None], shape)
      >>> Rows().select(jnp.array([[1.0, 2.0], [4.0, 0.0]]), 0.5)
      Array([[0, 0],
             [1, 1]], dtype=uint8)
    """

    # Whether each entry is a unit, so that entries of all leaves can compete.
    is_elementwise: ClassVar[bool] = False
    # Axes of the units, first after the batch axes, that index the groups in which units compete.
    group_axes: ClassVar[int] = 0

    @property
    def ranks_units(self) -> bool:
        """True if `select` and `move` are those of this class: one search serves many leaves."""
        cls = type(self)
        return cls.select is SparsityType.select and cls.move is SparsityType.move

    @property
    def input_axes(self) -> tuple[int, ...]:
        """Contracted axes of a slice along which entries compete; () if fields name none."""
        return ()

    @property
    def inputs_per_group(self) -> int | None:
        """Number of consecutive inputs that compete with each other; `None`: all inputs."""
        return None

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        """Raises a ValueError that names the parameter if the pattern does not fit its shape.

        Args:
          shape: shape of the parameter, batch axes included.
          batch_axes: number of leading axes that index separate slices.
          name: the parameter's path, joined by '/'.
        """

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        """Pools the scores of the entries to scores of the units, [*batch, *groups, ...units]."""
        return scores

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        """Expands the mask of the units to the mask of the entries, of shape `shape`."""
        return units

    def renumber_axes(self, fn: Callable[[int], int]) -> Self:
        """Returns the pattern with `fn(axis)` in place of each axis that its fields name.

        A pattern whose fields name axes overrides this method: a layer of a stack, which `oneshot`
        prunes by itself, has fewer axes than the stack.

        Raises:
          ValueError: the pattern numbers an `axis` and does not override this method.
        """
        if isinstance(getattr(self, "axis", None), int):
            raise ValueError(
                f"{self} numbers an axis and has no renumber_axes, which oneshot calls for a layer "
                "of a stack. Return the pattern with fn(axis) in place of the axis."
            )
        return self

    def for_matrix(self) -> SparsityType | None:
        """Returns the pattern of a matrix [inputs, outputs], whose inputs are pruned in order.

        `None` if units hold entries of several inputs.
        """
        return None

    def outputs_per_group(self, outputs: int) -> int:
        """Returns how many neighbouring outputs keep the same inputs, 0 if their inputs differ."""
        return 0

    def final_sparsity(self, target: float) -> float:
        """Returns the sparsity of a mask at the end of a ramp to `target`."""
        return target

    def count_kept(
        self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0
    ) -> int | None:
        """Returns the number of entries that `select` keeps of each slice, and `move` preserves.

        Returns `None` if the number depends on the scores, which is the default of a pattern with
        units of its own. A class that overrides `select` or `pool` overrides this method too.

        Args:
          shape: shape of the parameter, batch axes included.
          sparsity: fraction to remove, in [0, 1].
          batch_axes: number of leading axes that index separate slices.
        """
        return None

    def select(
        self,
        scores: chex.Array,
        sparsity: chex.Numeric,
        *,
        target: chex.Numeric | None = None,
        batch_axes: int = 0,
        topk_fn: Callable[[jax.Array, chex.Numeric], chex.Array] | None = None,
    ) -> jax.Array:
        """Returns a uint8 mask of the best units of each slice.

        Of n units (entries, blocks, channels) `sparsity.selection.num_kept(n, sparsity)` are kept;
        with `group_axes`, of the n units of each group.

        Args:
          scores: [*batch, ...] array of any real dtype.
          sparsity: scalar in [0, 1], Python or traced.
          target: end of the ramp, for patterns with a fixed density.
          batch_axes: number of leading axes that index separate slices.
          topk_fn: `topk_fn(scores, sparsity) -> mask` replaces the selection; its scores are the
            units of one slice, or of one group, and it keeps units where its mask is not zero.

        Returns:
          uint8 mask of the shape of `scores`.
        """
        check_arrays(batch_axes, scores=scores)
        checks.check_fraction("sparsity", sparsity)
        checks.check_function("topk_fn", topk_fn, "(scores, sparsity)", optional=True)

        def create(scores: jax.Array, sparsity: chex.Numeric) -> jax.Array:
            leading = batch_axes + self.group_axes
            units = pool_units(self, scores, batch_axes)
            if topk_fn is None:
                k = selection.num_kept(math.prod(units.shape[leading:]), sparsity)
                mask = selection.topk_mask(units, k, batch_axes=leading)
            else:
                choose = topk_fn
                for _ in range(leading):
                    choose = jax.vmap(choose, in_axes=(0, None))
                chosen = choose(units, sparsity)
                checks.check_real_array(f"the mask of topk_fn = {topk_fn!r}", chosen, units.shape)
                mask = jnp.asarray(chosen).astype(bool).astype(jnp.uint8)
            return expand_units(self, mask, scores.shape, batch_axes)

        return sharding.shard_like(scores, create, scores, sparsity)

    def move(
        self,
        mask: chex.Array,
        drop_scores: chex.Array,
        grow_scores: chex.Array,
        drop_fraction: chex.Numeric,
        *,
        batch_axes: int = 0,
    ) -> jax.Array:
        """Returns the mask with a fraction of its active units replaced by as many others.

        Of the n active units of each slice `sparsity.selection.num_kept(n, drop_fraction)` are
        kept. The others grow among all units that were not kept, so that a dropped unit may return.

        Args:
          mask: [*batch, ...] uint8 array, the current mask.
          drop_scores: same shape; active units with the lowest scores are dropped.
          grow_scores: same shape; of all units that are not kept, those with the highest grow.
          drop_fraction: scalar in [0, 1].
          batch_axes: number of leading axes that index separate slices.

        Returns:
          uint8 mask of the same shape.
        """
        check_arrays(batch_axes, mask=mask, drop_scores=drop_scores, grow_scores=grow_scores)
        checks.check_fraction("drop_fraction", drop_fraction)

        def move(fraction: chex.Numeric, *arrays: jax.Array) -> jax.Array:
            # A unit is all ones or all zeros.
            active, drop, grow = (pool_units(self, x, batch_axes) for x in arrays)
            leading = batch_axes + self.group_axes
            kept, num_dropped = keep_active(active, drop, fraction, leading)
            grown = selection.topk_mask(grow, num_dropped, where=1 - kept, batch_axes=leading)
            return expand_units(self, kept | grown, mask.shape, batch_axes)

        return sharding.shard_like(mask, move, drop_fraction, mask, drop_scores, grow_scores)


@dataclasses.dataclass(frozen=True)
class Unstructured(SparsityType):
    """Keeps or removes each entry by itself.

    Example:
      >>> Unstructured().select(jnp.array([1.0, 3.0, 2.0, 0.0]), 0.5)
      Array([0, 1, 1, 0], dtype=uint8)
    """

    is_elementwise = True

    def for_matrix(self) -> SparsityType:
        return Unstructured()  # the subclass of a user may have no hash

    def count_kept(
        self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0
    ) -> int | None:
        return selection.num_kept(math.prod(shape[batch_axes:]), sparsity)


# ------------------------------------------------------------------ units
def pool_units(
    pattern: SparsityType, scores: jax.Array, batch_axes: int, name: str = "scores"
) -> jax.Array:
    """Returns the scores of units by `pool` of a pattern; the error names the parameter."""
    units = pattern.pool(scores, batch_axes)
    checks.check_real_array(f"{pattern}.pool of {name!r}", units)
    return units


def expand_units(
    pattern: SparsityType,
    units: jax.Array,
    shape: tuple[int, ...],
    batch_axes: int,
    name: str = "scores",
) -> jax.Array:
    """Returns the mask of entries by `expand` of a pattern; the error names the parameter."""
    mask = pattern.expand(units, shape, batch_axes)
    checks.check_real_array(f"{pattern}.expand of {name!r}", mask, shape)
    return mask


def check_arrays(batch_axes: int, **arrays: chex.Array) -> None:
    """Raises a ValueError that names an array that is not real, or of another shape."""
    shape = None
    for name, array in arrays.items():
        checks.check_real_array(name, array, shape)
        shape = array.shape
    checks.check_int("batch_axes", batch_axes, 0, len(shape or ()))


def keep_active(
    active: jax.Array, scores: jax.Array, drop_fraction: chex.Numeric, batch_axes: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the mask of the units that stay active, and the number dropped in each slice."""
    num_active = count(active.astype(bool), range(batch_axes, active.ndim))
    k = jnp.asarray(selection.num_kept(num_active, drop_fraction))
    return selection.topk_mask(scores, k, where=active, batch_axes=batch_axes), num_active - k


def sum_units(scores: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
    """Sums scores along axes in at least float32, scaled if a sum of all would overflow."""
    wide = scores.astype(promote(scores.dtype, jnp.float32))
    return jnp.sum(scale_for_sums([wide], wide.size)[0], axes)


# ------------------------------------------------------------------ axes
def absolute_axis(axis: int, batch_axes: int, ndim: int) -> int:
    """Converts an axis within a slice to a non-negative axis of the array."""
    return (axis if axis < 0 else axis + batch_axes) % ndim


def check_axis(
    pattern: SparsityType, axis: int, shape: tuple[int, ...], batch_axes: int, name: str
) -> None:
    """Raises a ValueError that names the parameter if its slices have no such axis."""
    ndim = len(shape) - batch_axes
    if not -ndim <= axis < ndim:
        parameter = describe_parameter(shape, batch_axes, name)
        raise ValueError(f"{pattern}: {parameter} has no axis {axis}. {REMEDY}")


def describe_parameter(shape: tuple[int, ...], batch_axes: int, name: str) -> str:
    """Describes a parameter for messages."""
    batch = f" (of which {batch_axes} leading are batch axes)" if batch_axes else ""
    return f"parameter {name!r} of shape {shape}{batch}"


# ------------------------------------------------------------------ numbers without scores
def read_final_sparsity(pattern: SparsityType, target: float, name: str) -> float | None:
    """Returns the sparsity of masks at the end of a ramp, `None` if the pattern does not know it.

    Args:
      pattern: the pattern of the mask.
      target: end of the ramp.
      name: the parameter's path, for messages.

    Raises:
      ValueError: the sparsity of the pattern is no number in [0, 1], beyond rounding.
    """
    with sharding.evaluate_now():
        final: object = pattern.final_sparsity(target)
    if final is None:
        return None
    nearest = min(max(checks.as_float(final), 0.0), 1.0)
    if not abs(checks.as_float(final) - nearest) <= ROUNDING:  # NaN, too
        checks.check_fraction(f"{pattern}.final_sparsity of {name!r}", final)
    return nearest


def read_count(
    pattern: SparsityType, shape: tuple[int, ...], sparsity: float, batch_axes: int, name: str
) -> int | None:
    """Returns the number of entries that a slice keeps, `None` if it depends on scores.

    Raises:
      ValueError: `count_kept` of the pattern returns no number of entries of a slice.
    """
    if (number := pattern.count_kept(shape, sparsity, batch_axes)) is None:
        return None
    label = f"{pattern}.count_kept of {name!r}"
    checks.check_int(label, int(number), 0, math.prod(shape[batch_axes:]))
    return int(number)


def entry_counter(
    pattern: SparsityType, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params"
) -> Callable[[float], int]:
    """Returns a function from a sparsity to the largest number of entries that a mask keeps.

    Args:
      pattern: the pattern of the mask.
      shape: shape of the parameter, batch axes included.
      batch_axes: number of leading axes that index separate slices.
      name: the parameter's path, for messages.

    Raises:
      ValueError: from the function, if `count_kept` or `final_sparsity` of the pattern returns no
        number of entries of a slice, or no number in [0, 1].

    Example:
      >>> from sparsity.patterns import Block
      >>> entry_counter(Block((2, 2)), (4, 6))(0.5)
      12
    """
    slices, size = math.prod(shape[:batch_axes]), math.prod(shape[batch_axes:])
    if not slices * size:
        return lambda sparsity: 0
    if pattern.count_kept(shape, 0.5, batch_axes) is not None:
        return lambda x: slices * (read_count(pattern, shape, x, batch_axes, name) or 0)
    if not pattern.ranks_units:
        return lambda x: math.ceil(
            slices * size * (1 - Fraction(read_final_sparsity(pattern, x, name) or 0))
        )
    units, largest = _count_units(pattern, shape, batch_axes)
    return lambda sparsity: slices * min(size, selection.num_kept(units, sparsity) * largest)


def _count_units(pattern: SparsityType, shape: tuple[int, ...], batch_axes: int) -> tuple[int, int]:
    """Returns the units of a group, and the entries of the first, full unit of all groups."""
    scores = jax.ShapeDtypeStruct(shape, np.float32)
    units = jax.eval_shape(lambda scores: pattern.pool(scores, batch_axes), scores).shape
    first_unit = np.zeros(units, np.uint8)
    leading = batch_axes + pattern.group_axes
    first_unit[
        (0,) * batch_axes + (slice(None),) * pattern.group_axes + (0,) * len(units[leading:])
    ] = 1
    with sharding.evaluate_now():
        entries = np.count_nonzero(pattern.expand(jnp.asarray(first_unit), shape, batch_axes))
    return math.prod(units[leading:]), int(entries)
