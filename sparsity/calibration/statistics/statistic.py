"""Statistics of the inputs that a weight meets, and the roles of its axes.

A product contracts some axes of a parameter with its inputs, keeps others as outputs, and repeats
over all further ones (stacked layers, experts). A `Statistic` names these axes, so that pruners and
refits see a parameter of any layout as matrices [*batch, outputs, inputs] and need nothing else of
the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int, check_kind, is_traced
from sparsity.core.trees import Path, PyTree
from sparsity.masks import Site

T = TypeVar("T")
_NO_SUMS = ("count", "multiplier", "offset")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """Sums over the rows of the inputs of a weight.

    In shapes, `inputs` is the number of entries of the contracting axes, in the order of
    `contracting`; `batch` are the sizes of the batch axes in their order, then `groups` if above 1.
    Sums are in promote_types(dtype of the inputs, float32).

    Attributes:
      squares: [*batch, inputs], sums of |x|^2, real; or `None`.
      sums: [*batch, inputs], sums of x; or `None`.
      gram: [*batch, inputs, inputs], X^T X, or X^H X for complex inputs; or `None`.
      count: number of rows, or numbers [*batch]; sums of row weights where rows have weights.
      multiplier: c of the weights c * parameter + d that the product reads, broadcastable to the
        parameter; `None` for 1. Where it is bool, the parameter is c * weights already, and weights
        stay 0 where it is False.
      offset: d, likewise; `None` for 0.
      contracting: axes of the parameter that the product sums over, in the parameter's own order.
      output: axes of the parameter that the product keeps.
      batch: axes of the parameter that index separate matrices.
      groups: number of equal parts of the first output axis with separate inputs (grouped and
        depthwise convolutions).

    Raises:
      ValueError: axes are no tuples of different integers from 0, or groups is no integer above 0.
        Arrays are checked where a statistic meets its parameter.

    Example:
      >>> x = jnp.array([[1.0, 2.0], [3.0, 0.0]])
      >>> kernel = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> kernel.sums_of_squares()
      Array([10.,  4.], dtype=float32)
      >>> kernel.to_matrices(jnp.zeros((2, 5))).shape
      (5, 2)
    """

    squares: jax.Array | None = None
    sums: jax.Array | None = None
    gram: jax.Array | None = None
    count: jax.Array | np.ndarray | float
    multiplier: jax.Array | None = None
    offset: jax.Array | None = None
    contracting: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    output: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    batch: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    groups: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("contracting", "output", "batch"):
            axes = getattr(self, name)
            check_kind(name, axes, tuple, "a tuple of axes")
            for axis in axes:
                check_int(f"each axis of {name}", axis, 0)
            if len({*axes}) < len(axes):
                raise ValueError(f"{name} must name each axis once, got {name} = {axes}.")
        check_int("groups", self.groups, 1)

    def list_sums(self) -> dict[str, jax.Array | None]:
        """Returns the arrays of sums by field: `squares`, `sums` and `gram`, each or `None`."""
        arrays = (field for field in dataclasses.fields(self) if not field.metadata.get("static"))
        names = (field.name for field in arrays if field.name not in _NO_SUMS)
        return {name: getattr(self, name) for name in names}

    def scale_weights(self, param: jax.Array) -> jax.Array:
        """Returns the multiplier times a parameter or a difference, in float32 at least."""
        if self.multiplier is None:
            return param
        return sharding.shard_like(param, _scale, param, self.multiplier)

    def read_weights(self, param: jax.Array) -> jax.Array:
        """Returns the weights that the product reads: multiplier * parameter + offset."""
        scaled = self.scale_weights(param)
        return scaled if self.offset is None else scaled + self.offset.astype(scaled.dtype)

    def for_scaled_weights(self) -> Statistic:
        """Returns the statistic of the parameters that `scale_weights` returns.

        Its multiplier says where weights stay 0; `None` if nowhere.
        """
        live = None if self.multiplier is None else self.multiplier != 0
        if live is not None and not is_traced(live) and bool(live.all()):
            live = None
        return dataclasses.replace(self, multiplier=live)

    def sums_of_squares(self) -> jax.Array:
        """Returns the sums of squares, [*batch, inputs]: `squares`, or the diagonals of `gram`."""
        if self.squares is not None:
            return self.squares
        grams = dataclasses.replace(self, multiplier=None).require_grams()
        return jnp.real(jnp.diagonal(grams, axis1=-2, axis2=-1))

    def require_grams(self) -> jax.Array:
        """Returns the Gram matrices, or raises a ValueError if there are none."""
        if self.gram is None:
            raise ValueError(
                "The statistic has no Gram matrix. Calibrate with kind='gram'; oneshot does so for "
                "a pruner whose class has statistics_kind = 'gram'."
            )
        if self.multiplier is not None and self.multiplier.dtype != jnp.bool_:
            raise ValueError(
                "The product reads multiplier * parameter, and its Gram matrix fits no other "
                "weights: pass statistic.scale_weights(parameter) with "
                "statistic.for_scaled_weights()."
            )
        return self.gram

    def require_real_grams(self) -> jax.Array:
        """Returns the real parts of the Gram matrices, which real weights meet."""
        return self.require_grams().real

    def read_batch_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of `batch` and `groups` for a parameter of that shape."""
        groups = (self.groups,) if self.groups > 1 else ()
        return (*(shape[axis] for axis in self.batch), *groups)

    def count_inputs(self, shape: tuple[int, ...]) -> int:
        """Returns the number of inputs of a parameter of that shape."""
        return math.prod(shape[axis] for axis in self.contracting)

    def to_matrices(self, param: jax.Array) -> jax.Array:
        """Returns a parameter, or its mask or scores, as [*batch, outputs, inputs]."""
        axes = (*self.batch, *self.output, *self.contracting)
        lead, inputs = self.read_batch_shape(param.shape), self.count_inputs(param.shape)
        outputs = param.size // max(math.prod(lead) * inputs, 1)
        moved, shape = param.transpose(axes), (*lead, outputs, inputs)
        return sharding.shard_like(moved, lambda x: x.reshape(shape), moved, shape=shape)

    def from_matrices(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `to_matrices` for a parameter of that shape."""
        axes = (*self.batch, *self.output, *self.contracting)
        moved = matrices.reshape([shape[axis] for axis in axes])
        return moved.transpose(np.argsort(axes))

    def map_matrices(
        self, fn: Callable[..., T], *params: jax.Array, square_matrices: jax.Array | None = None
    ) -> T:
        """Returns parameters that `fn` computes from the matrices of real ones and their Grams.

        Args:
          fn: called with [outputs, inputs] of each parameter, as wide as the Gram, then the Gram.
          *params: real parameters of one shape.
          square_matrices: [*batch, n, n], real, which `fn` gets in place of the Gram matrices.
        """
        if square_matrices is None:
            square_matrices = self.require_real_grams()
        dtype = promote(params[0].dtype, square_matrices.dtype)
        for _ in square_matrices.shape[:-2]:
            fn = jax.vmap(fn)
        wide = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in params]
        results = fn(*map(self.to_matrices, wide), square_matrices.astype(dtype))
        return jax.tree.map(lambda x: self.from_matrices(x, params[0].shape), results)

    def add_batch_axes(self, site: Site, shape: tuple[int, ...]) -> Statistic:
        """Returns the statistic with all batch axes of the site among its batch axes.

        Raises:
          ValueError: the product sums over a batch axis of the site.
        """
        new_axes = [axis for axis in range(site.batch_axes) if axis not in self.batch]
        if not new_axes:
            return self
        if self.groups > 1 or not set(new_axes) <= set(self.output):
            raise ValueError(
                f"batch_axes = {site.batch_axes} of {site.name!r}, shape {shape}, cuts through "
                f"inputs or groups: its product contracts axes {self.contracting} with groups = "
                f"{self.groups}. Give the number of leading axes that index separate matrices."
            )
        sizes = [shape[axis] for axis in new_axes]

        def repeat(x: chex.Array) -> jax.Array:
            """Repeats x[*batch, ...] for each of the new slices."""
            end = len(self.batch)
            wide = jnp.expand_dims(x, range(end, end + len(new_axes)))
            return jnp.broadcast_to(wide, (*x.shape[:end], *sizes, *x.shape[end:]))

        return dataclasses.replace(
            self,
            **jax.tree.map(repeat, self.list_sums()),
            count=repeat(jnp.asarray(self.count)) if np.ndim(self.count) else self.count,
            output=tuple(axis for axis in self.output if axis not in new_axes),
            batch=(*self.batch, *new_axes),
        )

    def with_squares(
        self, shape: tuple[int, ...], innermost: int
    ) -> tuple[Statistic, np.ndarray | None]:
        """Returns a copy with squares alone, whose inputs along the axis `innermost` are adjacent.

        Returns:
          (the copy, int[inputs] with the places of its inputs here, `None` if none has moved).
        """
        order = (*(axis for axis in self.contracting if axis != innermost), innermost)
        squares, permutation = self.sums_of_squares(), None
        if order != self.contracting:
            sizes = [shape[axis] for axis in self.contracting]
            axes = [self.contracting.index(axis) for axis in order]
            permutation = np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).ravel()
            squares = squares[..., permutation]
        arrays: PyTree = {**dict.fromkeys(self.list_sums()), "squares": squares}
        return dataclasses.replace(self, **arrays, contracting=order), permutation


def _scale(param: jax.Array, multiplier: jax.Array) -> jax.Array:
    dtype = promote(param.dtype, multiplier.dtype, jnp.float32)
    return param.astype(dtype) * multiplier.astype(dtype)


Statistics: TypeAlias = Mapping[Path, Statistic]
