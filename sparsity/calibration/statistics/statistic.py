"""Statistics of the inputs that a weight meets, and the roles of its axes.

A product contracts some axes of a leaf with its inputs, keeps others as outputs, and repeats over
all further ones (stacked layers, experts). A `Statistic` names these axes, so that pruners and
refits see a leaf of any layout as matrices [*batch, outputs, inputs] and need nothing else of the
model.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.statistics.counts import Count
from sparsity.core import host, trees
from sparsity.core.checks import check_int, check_kind, is_traced
from sparsity.core.trees import Path, PyTree
from sparsity.masks import Site


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
      count: number of rows, an integer or integers [*batch], or an exact `Count` of any size.
      contracting: axes of the leaf that the product sums over, in the leaf's own order.
      output: axes of the leaf that the product keeps.
      batch: axes of the leaf that index separate matrices.
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
      >>> kernel.matrices(jnp.zeros((2, 5))).shape
      (5, 2)
    """

    squares: jax.Array | None = None
    sums: jax.Array | None = None
    gram: jax.Array | None = None
    count: Count | jax.Array | int
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

    def sums_of_squares(self) -> jax.Array:
        """Returns the sums of squares, [*batch, inputs]: `squares`, or the diagonals of `gram`."""
        if self.squares is not None:
            return self.squares
        diagonals: jax.Array = _diagonals(self.grams())
        return diagonals

    def grams(self) -> jax.Array:
        """Returns the Gram matrices, or raises a ValueError if there are none."""
        if self.gram is None:
            raise ValueError(
                "The statistic has no Gram matrix. Calibrate with kind='gram'; oneshot does so for "
                "a pruner whose class has statistics_kind = 'gram'."
            )
        return self.gram

    def real_grams(self) -> jax.Array:
        """Returns the real parts of the Gram matrices, which real weights meet."""
        return self.grams().real

    def lead(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of `batch` and `groups` for a leaf of that shape."""
        groups = (self.groups,) if self.groups > 1 else ()
        return (*(shape[axis] for axis in self.batch), *groups)

    def inputs(self, shape: tuple[int, ...]) -> int:
        """Returns the number of inputs of a leaf of that shape."""
        return math.prod(shape[axis] for axis in self.contracting)

    def matrices(self, leaf: jax.Array) -> jax.Array:
        """Returns a leaf, or its mask or scores, as [*batch, outputs, inputs]."""
        axes = (*self.batch, *self.output, *self.contracting)
        lead, inputs = self.lead(leaf.shape), self.inputs(leaf.shape)
        outputs = leaf.size // max(math.prod(lead) * inputs, 1)
        return leaf.transpose(axes).reshape(*lead, outputs, inputs)

    def leaf(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `matrices` for a leaf of that shape."""
        axes = (*self.batch, *self.output, *self.contracting)
        moved = matrices.reshape([shape[axis] for axis in axes])
        return moved.transpose(np.argsort(axes))

    def solve(self, fn: Callable[..., PyTree], *leaves: jax.Array) -> PyTree:
        """Returns leaves that `fn` computes from each matrix of real leaves, and its Gram matrix.

        Args:
          fn: called with [outputs, inputs] of each leaf, floats as wide as the Gram, then the Gram.
          *leaves: real leaves of one shape.
        """
        grams = self.real_grams()
        dtype = jnp.promote_types(leaves[0].dtype, grams.dtype)
        for _ in grams.shape[:-2]:
            fn = jax.vmap(fn)
        wide = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves]
        solved = fn(*map(self.matrices, wide), grams.astype(dtype))
        return jax.tree.map(lambda x: self.leaf(x, leaves[0].shape), solved)

    def sliced(self, site: Site, shape: tuple[int, ...]) -> Statistic:
        """Returns the statistic with all batch axes of the site among its batch axes.

        Raises:
          ValueError: the product sums over a batch axis of the site.
        """
        new = [axis for axis in range(site.batch_axes) if axis not in self.batch]
        if not new:
            return self
        if self.groups > 1 or not set(new) <= set(self.output):
            raise ValueError(
                f"batch_axes = {site.batch_axes} of {site.name!r}, shape {shape}, cuts through "
                f"inputs or groups: its product contracts axes {self.contracting} with groups = "
                f"{self.groups}. Give the number of leading axes that index separate matrices."
            )
        batch = (*self.batch, *new)
        num_batch = len(self.batch)

        def repeat(x: Any, axes: int) -> Any:
            """Repeats x[*batch, ...] for each of the new slices."""
            if x is None or (axes == 0 and jnp.ndim(x) == 0):
                return x
            sizes = [shape[axis] for axis in new]
            wide = jnp.expand_dims(x, range(num_batch, num_batch + len(new)))
            return jnp.broadcast_to(wide, (*x.shape[:num_batch], *sizes, *x.shape[num_batch:]))

        count: Any = self.count
        if isinstance(count, Count):
            digits = jnp.moveaxis(jnp.asarray(count.digits), 0, -1)
            count = Count(jnp.moveaxis(repeat(digits, 1), -1, 0)) if digits.ndim > 1 else count
        else:
            count = repeat(count, 0)
        return dataclasses.replace(
            self,
            squares=repeat(self.squares, 1),
            sums=repeat(self.sums, 1),
            gram=repeat(self.gram, 2),
            count=count,
            output=tuple(axis for axis in self.output if axis not in new),
            batch=batch,
        )

    def with_squares(
        self, shape: tuple[int, ...], innermost: int
    ) -> tuple[Statistic, np.ndarray | None]:
        """Returns a copy with squares alone, whose inputs along the axis `innermost` are adjacent.

        Returns:
          (the copy, int[inputs] with the places of its inputs here, `None` if none has moved).
        """
        order = (*(axis for axis in self.contracting if axis != innermost), innermost)
        squares, places = self.sums_of_squares(), None
        if order != self.contracting:
            sizes = [shape[axis] for axis in self.contracting]
            axes = [self.contracting.index(axis) for axis in order]
            places = np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).ravel()
            squares = squares[..., places]
        alone = dataclasses.replace(self, squares=squares, sums=None, gram=None, contracting=order)
        return alone, places


@host.instead(lambda grams: np.real(np.diagonal(grams, axis1=-2, axis2=-1)))
def _diagonals(grams: jax.Array) -> jax.Array:
    return jnp.real(jnp.diagonal(grams, axis1=-2, axis2=-1))


Statistics = Mapping[Path, Statistic]


def look_up_statistic(
    statistics: Statistics | None,
    site: Site,
    shape: tuple[int, ...],
    kind: Literal["squares", "moments", "gram"],
    who: str,
) -> Statistic:
    """Returns the statistic of a leaf, checked, with the batch axes of its site.

    Args:
      statistics: by path.
      site: the leaf.
      shape: its shape.
      kind: the kind of sums that are needed.
      who: the pruner or refit, for messages.

    Raises:
      ValueError: there is no statistic, or one that does not fit the leaf, lacks the kind, or is
        not finite.
    """
    name, path = site.name, trees.path_names(site.path)
    if statistics is None:
        raise ValueError(
            f"{who} needs statistics of the inputs of each weight, got statistics = None. Pass "
            f"statistics=sparsity.calibrate(fn, params, batches, kind={kind!r}) to "
            "instant_sparsify, or to the optimizer's update."
        )
    if path not in statistics:
        raise ValueError(
            f"{who}: statistics has no entry {path} for {name!r}, which has a sparsity. No product "
            "of the model reads it, one reads parts of it or is a ragged_dot, or the calibration "
            "saw another model. Keep it dense with filter_fn or custom_sparsity_map={path: None}."
        )
    statistic = statistics[path]
    check(statistic, shape, name)
    warn_of_zeros(statistic, name)
    if kind == "gram" and statistic.gram is None:
        raise ValueError(
            f"{who} needs the Gram matrix of {name!r}, and its statistic has none. Calibrate with "
            "kind='gram'."
        )
    if kind == "moments" and (statistic.sums is None or statistic.squares is None):
        raise ValueError(
            f"{who} needs the means of the inputs of {name!r}, and its statistic has none. "
            "Calibrate with kind='moments'."
        )
    return statistic.sliced(site, shape)


def check(statistic: Statistic, shape: tuple[int, ...], name: str) -> None:
    """Raises a ValueError that names the leaf unless its statistic fits and is finite."""
    axes = (*statistic.batch, *statistic.output, *statistic.contracting)
    if sorted(axes) != [*range(len(shape))]:
        raise ValueError(
            f"The statistic of {name!r} must name each axis of shape {shape} once, from 0, got "
            f"batch = {statistic.batch}, output = {statistic.output}, contracting = "
            f"{statistic.contracting}."
        )
    first = shape[statistic.output[0]] if statistic.output else 1
    if statistic.groups < 1 or first % statistic.groups:
        raise ValueError(
            f"The statistic of {name!r} has groups = {statistic.groups}, which must divide its "
            f"first output axis, of size {first}."
        )
    lead, inputs = statistic.lead(shape), statistic.inputs(shape)
    each = (*lead, inputs)
    shapes = {"squares": each, "sums": each, "gram": (*each, inputs)}
    values = {field: getattr(statistic, field) for field in shapes}
    values = {field: value for field, value in values.items() if value is not None}
    if not values.keys() - {"sums"}:
        raise ValueError(f"The statistic of {name!r} has neither squares nor gram.")
    _check_count(statistic.count, name)
    for field, value in values.items():
        if value.shape != shapes[field]:
            raise ValueError(
                f"The {field} of {name!r}, shape {shape}, must have shape {shapes[field]}, got "
                f"{value.shape}."
            )
        if not is_finite(value):
            raise ValueError(
                f"The {field} of the inputs of {name!r} are not all finite: an activation was NaN "
                "or infinite. Calibrate in a wider dtype, or find the batch that makes it so."
            )
        if field == "squares" and jnp.iscomplexobj(value):
            raise ValueError(
                f"The squares of the inputs of {name!r} must be real, sums of |x|^2, got "
                f"{value.dtype}. Take the real part of sums of x conj(x)."
            )


def _check_count(count: Count | jax.Array | int, name: str) -> None:
    """Raises a ValueError that names the leaf unless a count, if concrete, counts rows."""
    if any(map(is_traced, jax.tree.leaves(count))):
        return
    rows = np.asarray(count)
    if rows.dtype.kind not in "iu" or (rows < 0).any():
        raise ValueError(
            f"The statistic of {name!r} must count rows by integers >= 0, got count = {count!r}. "
            "Sums of int32 beyond 2**31 become negative: add up sparsity.calibration.Count."
        )


def not_finite(name: str, batch: int) -> ValueError:
    """Returns the error of a leaf whose inputs are NaN or infinite in a batch."""
    return ValueError(
        f"The inputs of {name!r} are not all finite in batch {batch}: an activation, or the sum of "
        "its squares, is NaN or infinite. Look at that batch, or calibrate in a wider dtype."
    )


def is_finite(value: jax.Array) -> bool:
    """Returns whether all entries are finite; traced ones pass."""
    if is_traced(value):
        return True
    with jax.ensure_compile_time_eval():  # a constant within a function that is traced
        return bool(_all_finite(value))


@host.instead(lambda value: np.isfinite(value).all())
def _all_finite(value: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(value))


@host.instead(lambda x: (x == 0).all(axis=-1))
def _are_zeros(x: jax.Array) -> jax.Array:
    """Returns whether all entries along the last axis are 0."""
    return jnp.all(x == 0, axis=-1)


def warn_of_zeros(statistic: Statistic, name: str) -> None:
    """Warns of inputs that were 0 in all rows, which say nothing about the weights."""
    squares = statistic.sums_of_squares()
    if is_traced(squares) or not squares.size:
        return
    with jax.ensure_compile_time_eval():
        is_zero = np.asarray(jax.device_get(_are_zeros(squares)))
    if is_zero.any():
        where = "All inputs of" if is_zero.all() else f"Slices {np.argwhere(is_zero).tolist()} of"
        warnings.warn(
            f"{where} {name!r} met nothing but zeros in the calibration data, which say nothing "
            "about these weights: ties decide which of them stay. Calibrate with data that reach "
            "them, or keep them dense with filter_fn or custom_sparsity_map={path: None}.",
            stacklevel=1,  # one place, so that a weight is named once
        )


def check_solvable(
    statistic: Statistic, param: jax.Array, name: str, damping: float | None = None
) -> None:
    """Checks that a Gram matrix can reconstruct weights, and warns of directions without data.

    Args:
      statistic: the statistic of the inputs.
      param: the weights.
      name: the name of the parameter.
      damping: the addition to the diagonal, for the message; `None`: there is none.

    Raises:
      ValueError: the weights are complex.
    """
    if jnp.issubdtype(param.dtype, jnp.complexfloating):
        raise ValueError(
            f"{name!r} is {param.dtype}, and only real weights can be reconstructed. Keep it "
            "dense, or prune it with WandaPruning and no refit."
        )
    inputs = statistic.inputs(param.shape)
    if any(map(is_traced, jax.tree.leaves(statistic.count))):
        return
    rows = int(np.min(np.asarray(statistic.count)))
    if rows < inputs:
        remedy = "Weights that the data leave free stay near those of the pruner."
        if damping:
            remedy = f"What the data do not say, damping = {damping} decides."
        warnings.warn(
            f"The statistic of {name!r} has {rows} rows for {inputs} inputs, so that its Gram "
            f"matrix is singular. {remedy} More calibration data would say more.",
            stacklevel=2,
        )


def output_error(statistic: Statistic, difference: jax.Array) -> jax.Array:
    """Returns sum(|X d|^2) over the rows, for the weights d of each output: [*batch, outputs].

    Args:
      statistic: with a Gram matrix.
      difference: the difference of two leaves; or a leaf, for the norm of its outputs.
    """
    grams, rows = statistic.grams(), statistic.matrices(difference)
    rows = rows.astype(jnp.promote_types(rows.dtype, grams.dtype))
    outputs = dot(rows.conj(), grams)
    return (outputs * rows).sum(axis=-1).real


def squared_means(statistic: Statistic, leaf: jax.Array) -> jax.Array:
    """Returns |sum(X d)|^2 / n over n rows: the part of `output_error` that means make.

    Args:
      statistic: with `sums`.
      leaf: the weights d of each output.

    Returns:
      [*batch, outputs].
    """
    xp = host.namespace([leaf])
    sums, rows = xp.asarray(statistic.sums), statistic.matrices(leaf)
    rows = rows.astype(jnp.promote_types(rows.dtype, sums.dtype))
    totals = dot(rows, sums[..., None])[..., 0]
    squares: jax.Array = xp.square(xp.abs(totals)) / num_rows(statistic, sums.ndim)
    return squares


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of matrices in their own precision."""
    xp, options = host.namespace([a, b]), {"precision": lax.Precision.HIGHEST}
    product: jax.Array = xp.matmul(a, b, **({} if xp is np else options))
    return product


def mean_outputs(statistic: Statistic, leaf: jax.Array) -> jax.Array:
    """Returns the means of the outputs over the rows, [*batch, outputs].

    Args:
      statistic: with `sums`.
      leaf: the weights of each output.
    """
    sums = jnp.asarray(statistic.sums)
    means = sums / num_rows(statistic, sums.ndim)
    return jnp.sum(statistic.matrices(leaf) * means[..., None, :], axis=-1)


def num_rows(statistic: Statistic, ndim: int) -> jax.Array:
    """Returns the numbers of rows, at least 1, with axes that broadcast to [*batch, ...]."""
    rows = statistic.count
    xp = host.namespace(jax.tree.leaves(rows))
    count = rows.as_float() if isinstance(rows, Count) else xp.asarray(rows, np.float32)
    wide: jax.Array = xp.maximum(count.reshape(*count.shape, *[1] * (ndim - count.ndim)), 1)
    return wide


def errors(
    statistic: Statistic, dense: jax.Array, *others: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the relative errors of some weights, and those after removing the means.

    Args:
      statistic: with a Gram matrix and `sums`.
      dense: the leaf before pruning.
      *others: the leaf after steps of pruning.

    Returns:
      (errors, centred errors), a scalar each for each of `others`.
    """
    leaves = dense, *(dense - other for other in others)
    total, *lost = (output_error(statistic, leaf).sum() for leaf in leaves)
    mean, *lost_means = (squared_means(statistic, leaf).sum() for leaf in leaves)
    centred = [centre(*pair, total, mean) for pair in zip(lost, lost_means, strict=True)]
    return [ratio(x, total) for x in lost], centred


def centre(lost: jax.Array, lost_mean: jax.Array, total: jax.Array, mean: jax.Array) -> jax.Array:
    """Returns the lost share of the outputs' variance, 0 where rounding hides the variance.

    Args:
      lost: sum of squares of the lost outputs.
      lost_mean: the part of it that their means make.
      total: sum of squares of the dense outputs.
      mean: the part of it that their means make.
    """
    xp, noise = host.namespace([total]), 16 * jnp.finfo(total.dtype).eps
    spread = xp.where(total - mean > noise * total, total - mean, 0)
    return ratio(xp.maximum(lost - lost_mean, 0), spread)


def ratio(part: jax.Array, total: jax.Array) -> jax.Array:
    """Returns part / total, 0 where the total is 0."""
    xp = host.namespace([total])
    share: jax.Array = xp.where(total > 0, part / xp.where(total > 0, total, 1), 0)
    return share


def relative_error(statistic: Statistic, dense: jax.Array, pruned: jax.Array) -> jax.Array:
    """Returns tr(D^H G D) / tr(W^H G W), D = W - pruned: the lost share of the outputs.

    Example:
      >>> kernel = Statistic(gram=jnp.diag(jnp.array([4.0, 1.0])), count=9, contracting=(0,),
      ...                    output=(1,))
      >>> relative_error(kernel, jnp.array([[2.0], [3.0]]), jnp.array([[2.0], [0.0]]))
      Array(0.36, dtype=float32)
    """
    lost = jnp.sum(output_error(statistic, dense - pruned))
    return ratio(lost, jnp.sum(output_error(statistic, dense)))
