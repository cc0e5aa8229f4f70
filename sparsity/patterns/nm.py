"""N:M patterns: n of every m consecutive entries along an axis."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import selection
from sparsity.core import sharding
from sparsity.core.checks import check_fraction, check_int
from sparsity.patterns import base

N_COLON_M = re.compile(r"\s*(\d{1,18})\s*:\s*(\d{1,18})\s*")


@dataclasses.dataclass(frozen=True)
class NByM(base.SparsityType):
    """Keeps at most `n` of every `m` consecutive entries along an axis; density n / m.

    Attributes:
      n: entries kept in each group, in [0, m].
      m: size of a group; must divide the axis.
      axis: the axis of the groups. Hardware skips zeros along the contraction axis, -2 for flax
        kernels of shape [in, out].

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks".

    Example:
      >>> NByM(2, 4).select(jnp.array([[1.0, 4.0, 3.0, 2.0]]), 0.5)
      Array([[0, 1, 1, 0]], dtype=uint8)
    """

    n: int
    m: int
    axis: int = -1

    def __post_init__(self) -> None:
        for name, least in (("n", 0), ("m", 1), ("axis", None)):
            check_int(f"NByM.{name}", getattr(self, name), least)
            # An int8 of numpy would overflow.
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.n > self.m:
            raise ValueError(
                f"NByM keeps n of every m entries, so n must be at most m; got n = {self.n}, "
                f"m = {self.m}. Did you mean NByM({self.m}, {self.n})?"
            )

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        base.check_axis(self, self.axis, shape, batch_axes, name)
        size = shape[base.absolute_axis(self.axis, batch_axes, len(shape))]
        if size % self.m:
            parameter = base.describe_parameter(shape, batch_axes, name)
            raise ValueError(
                f"{self}: axis {self.axis} of {parameter} has {size} entries, which "
                f"m = {self.m} does not divide. {base.REMEDY}"
            )

    @property
    def input_axes(self) -> tuple[int, ...]:
        return (self.axis,)

    def renumber_axes(self, fn: Callable[[int], int]) -> Self:
        return dataclasses.replace(self, axis=fn(self.axis))

    @property
    def inputs_per_group(self) -> int:
        return self.m

    def for_matrix(self) -> NByM:
        return NByM(self.n, self.m, axis=0)

    def final_sparsity(self, target: float) -> float:
        """Returns 1 - n / m for every target above 0."""
        return 1.0 - self.n / self.m if target > 0 else 0.0

    def count_kept(self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0) -> int:
        size = math.prod(shape[batch_axes:])
        return size // self.m * self.n if np.float32(sparsity) > 0 else size

    def select(
        self,
        scores: chex.Array,
        sparsity: chex.Numeric,
        *,
        target: chex.Numeric | None = None,
        batch_axes: int = 0,
        topk_fn: Callable[[jax.Array, chex.Numeric], chex.Array] | None = None,
    ) -> jax.Array:
        """Returns the mask of the n highest entries of each group, of more before the target.

        Args:
          scores: [*batch, ...] array of any real dtype.
          sparsity: scalar in [0, 1], Python or traced.
          target: the sparsity that keeps n of m; a lower `sparsity` keeps more of each group, in
            proportion. `None` means `sparsity` itself.
          batch_axes: number of leading axes that index separate slices.
          topk_fn: must be `None`, as the groups are ranked one by one.
        """
        if topk_fn is not None:
            raise ValueError(
                f"{self} ranks the entries of each group and needs topk_fn = None, got topk_fn = "
                f"{topk_fn!r}."
            )
        base.check_arrays(batch_axes, scores=scores)
        check_fraction("sparsity", sparsity)
        check_fraction("target", 0 if target is None else target)

        def create(scores: jax.Array, sparsity: chex.Numeric, target: chex.Numeric) -> jax.Array:
            axis = base.absolute_axis(self.axis, batch_axes, scores.ndim)
            num_kept = _count_kept_on_ramp(self.n, self.m, sparsity, target)
            return selection.nm_mask(scores, num_kept, self.m, axis=axis)

        return sharding.shard_like(
            scores, create, scores, sparsity, sparsity if target is None else target
        )

    def move(
        self,
        mask: chex.Array,
        drop_scores: chex.Array,
        grow_scores: chex.Array,
        drop_fraction: chex.Numeric,
        *,
        batch_axes: int = 0,
    ) -> jax.Array:
        """Returns the mask after each group has dropped entries and grown equally many."""
        base.check_arrays(batch_axes, mask=mask, drop_scores=drop_scores, grow_scores=grow_scores)
        check_fraction("drop_fraction", drop_fraction)

        def move(
            mask: jax.Array, drop: jax.Array, grow: jax.Array, fraction: chex.Numeric
        ) -> jax.Array:
            kept, _ = base.keep_active(mask, drop, fraction, batch_axes)
            axis = base.absolute_axis(self.axis, batch_axes, mask.ndim)
            grown = selection.nm_mask(grow, self.n, self.m, axis=axis, keep=kept)
            # A leaf with target 0 is dense and has no groups.
            return jnp.where(jnp.all(mask > 0), mask, grown)

        return sharding.shard_like(mask, move, mask, drop_scores, grow_scores, drop_fraction)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _count_kept_on_ramp(n: int, m: int, sparsity: chex.Numeric, target: chex.Numeric) -> jax.Array:
    """Returns max(n, ceil(m * (1 - sparsity / target * (1 - n / m)))), exactly n at the target."""
    sparsity, target = jnp.float32(sparsity), jnp.float32(target)
    progress = jnp.where(target > 0, sparsity / jnp.where(target > 0, target, 1), 0)
    # A division by a constant is a product with a rounded reciprocal once it is compiled.
    progress = jnp.where((target > 0) & (sparsity >= target), 1, progress)
    removed = jnp.floor(progress * (m - n)).astype(jnp.int32)
    return jnp.maximum(n, m - removed)


def parse_nm(name: str, pattern: object, axis: int = -1) -> NByM:
    """Reads a pattern that keeps at least one entry of a group.

    Args:
      name: name of the pattern in messages.
      pattern: (n, m), 'n:m', or an `NByM`.
      axis: the axis for (n, m) and 'n:m'.

    Raises:
      ValueError: the pattern is none of these, or n is not in [1, m].

    Example:
      >>> parse_nm("pattern", "1:4")
      NByM(n=1, m=4, axis=-1)
    """
    parsed = pattern
    if isinstance(parsed, str) and (match := N_COLON_M.fullmatch(parsed)):
        parsed = int(match[1]), int(match[2])
    try:
        if isinstance(parsed, tuple | list):
            n, m = parsed
            parsed = NByM(n, m, axis)
        if not isinstance(parsed, NByM):
            raise ValueError("A pattern is (n, m), 'n:m' or NByM(n, m, axis).")
        check_int("n", parsed.n, 1)
    except ValueError as error:
        raise ValueError(f"{name} = {pattern!r} is no pattern. {error}") from None
    return parsed
