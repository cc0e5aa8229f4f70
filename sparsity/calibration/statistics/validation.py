"""Checks that a statistic fits its parameter and says something about it."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.calibration.statistics.sums import (
    FIELDS_BY_KIND,
    StatisticsKind,
    check_statistics_kind,
)
from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind, is_real, is_traced, warn
from sparsity.core.trees import KeyPath, Masks, Params, PyTree, Tree
from sparsity.masks import Site, read_masks

_FIELD_NAMES = {"gram": "Gram matrix", "sums": "means of the inputs"}


def look_up_statistic(
    statistics: Statistics | None,
    site: Site,
    shape: tuple[int, ...],
    kind: StatisticsKind,
    label: str,
) -> Statistic:
    """Returns the statistic of a parameter, checked, with the batch axes of its site.

    Args:
      statistics: by path.
      site: the parameter.
      shape: its shape.
      kind: the kind of sums that are needed.
      label: the pruner or refit, for messages.

    Raises:
      ValueError: there is no such kind, or no statistic, or one that does not fit the parameter,
        lacks the kind, or is not finite.
    """
    check_statistics_kind(kind, label)
    name, path = site.name, trees.path_names(site.key_path)
    check_kind("statistics", statistics, Mapping | None, "a dict {path: Statistic}")
    if statistics is None:
        raise ValueError(
            f"{label} needs statistics of the inputs of each weight, got statistics = None. Pass "
            f"statistics=sparsity.calibrate(fn, params, batches, kind={kind!r}) to "
            "instant_sparsify, or to the optimizer's update."
        )
    if path not in statistics:
        raise ValueError(
            f"{label}: statistics has no entry {path} for {name!r}, which has a sparsity. No "
            "product of the model reads it, one reads parts of it, or a function of it, or is a "
            "ragged_dot, or the calibration saw another model. Keep it dense with filter_fn or "
            "custom_sparsity_map={path: None}."
        )
    statistic = statistics[path]
    check_statistic(statistic, shape, name)
    warn_of_zeros(statistic, name)
    # Solutions by Gram matrices read nothing else, but errors read sums where there are any.
    required = {"gram"} if kind == "gram" else FIELDS_BY_KIND[kind]
    if "squares" in required and statistic.squares is None:  # another method's Gram matrices
        statistic = dataclasses.replace(statistic, squares=statistic.sums_of_squares())
    for field in sorted(required):
        if getattr(statistic, field) is None:
            raise ValueError(
                f"{label} needs the {_FIELD_NAMES.get(field, field)} of {name!r}, and its "
                f"statistic has none. Calibrate with kind={kind!r}."
            )
    return statistic.add_batch_axes(site, shape)


def check_statistic(statistic: Statistic, shape: tuple[int, ...], name: str) -> None:
    """Raises a ValueError that names the parameter unless its statistic fits and is finite."""
    check_kind(f"the statistic of {name!r}", statistic, Statistic, "a Statistic")
    axes = (*statistic.batch, *statistic.output, *statistic.contracting)
    if sorted(axes) != [*range(len(shape))]:
        raise ValueError(
            f"The statistic of {name!r} must name each axis of shape {shape} once, from 0, got "
            f"batch = {statistic.batch}, output = {statistic.output}, contracting = "
            f"{statistic.contracting}."
        )
    num_first_outputs = shape[statistic.output[0]] if statistic.output else 1
    if statistic.groups < 1 or num_first_outputs % statistic.groups:
        raise ValueError(
            f"The statistic of {name!r} has groups = {statistic.groups}, which must divide its "
            f"first output axis, of size {num_first_outputs}."
        )
    lead, inputs = statistic.read_batch_shape(shape), statistic.count_inputs(shape)
    slice_shape = (*lead, inputs)
    sums = statistic.list_sums()
    shapes = dict.fromkeys(sums, slice_shape) | {"gram": (*slice_shape, inputs)}
    values = {field: x for field, x in sums.items() if x is not None}
    if values.keys().isdisjoint({"squares", "gram"}):
        raise ValueError(f"The statistic of {name!r} has neither squares nor gram.")
    _check_count(statistic.count, name)
    for field in ("multiplier", "offset"):
        value = getattr(statistic, field)
        if value is not None and not _broadcasts_to(value, shape):
            raise ValueError(
                f"The {field} of {name!r}, shape {shape}, must broadcast to this shape, got "
                f"{getattr(value, 'shape', value)}."
            )
    for field, value in values.items():
        if not trees.is_array(value) or value.shape != shapes[field]:
            raise ValueError(
                f"The {field} of {name!r}, shape {shape}, must have shape {shapes[field]}, got "
                f"{getattr(value, 'shape', value)}."
            )
        if not is_finite(value):
            raise ValueError(
                f"The {field} of the inputs of {name!r} are not all finite: an activation was NaN "
                "or infinite. Calibrate in a wider dtype, or find the batch that makes it so."
            )
        if field == "squares" and (
            jnp.iscomplexobj(value) or not _holds_for_all(lambda x: x >= 0, value)
        ):
            raise ValueError(
                f"The squares of the inputs of {name!r} must be real and >= 0, sums of |x|^2, got "
                f"squares = {value!r}. Take the real part of sums of x conj(x)."
            )


def _broadcasts_to(array: PyTree, shape: tuple[int, ...]) -> bool:
    """Returns whether an array broadcasts to a shape."""
    sizes = np.shape(array) if trees.is_array(array) else None
    if sizes is None or len(sizes) > len(shape):
        return False
    return all(n in (1, size) for n, size in zip(sizes[::-1], shape[::-1], strict=False))


def _check_count(count: jax.Array | np.ndarray | float, name: str) -> None:
    """Raises a ValueError that names the parameter unless a count, if concrete, counts rows."""
    if is_traced(count):
        return
    rows = np.asarray(count)
    if rows.dtype.kind not in "iuf" or not (rows >= 0).all():
        raise ValueError(
            f"The statistic of {name!r} must count rows by numbers >= 0, got count = {count!r}."
        )


def make_not_finite_error(name: str, batch: int) -> ValueError:
    """Returns the error of a parameter whose inputs are NaN or infinite in a batch."""
    return ValueError(
        f"The inputs of {name!r} are not all finite in batch {batch}: an activation, or the sum of "
        "its squares, is NaN or infinite. Look at that batch, or calibrate in a wider dtype."
    )


def is_finite(value: jax.Array) -> bool:
    """Returns whether all entries are finite; traced ones and integers pass."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    return _holds_for_all(jnp.isfinite, value)


def _holds_for_all(condition: Callable[[jax.Array], jax.Array], value: jax.Array) -> bool:
    """Returns whether a condition holds for all entries; traced ones pass."""
    if is_traced(value):
        return True
    with sharding.evaluate_now():  # a constant within a function that is traced
        return bool(condition(value).all())


def warn_of_zeros(statistic: Statistic, name: str) -> None:
    """Warns of inputs that were 0 in all rows, which say nothing about the weights."""
    sums = statistic.gram if statistic.squares is None else statistic.squares
    if sums is None or is_traced(sums) or not sums.size:
        return
    with sharding.evaluate_now():
        is_zero = np.asarray(statistic.sums_of_squares() == 0).all(axis=-1)
    if is_zero.any():
        subject = "All inputs of" if is_zero.all() else f"Slices {np.argwhere(is_zero).tolist()} of"
        warn(
            f"{subject} {name!r} met nothing but zeros in the calibration data, which say nothing "
            "about these weights: ties decide which of them stay. Calibrate with data that reach "
            "them, or keep them dense with filter_fn or custom_sparsity_map={path: None}."
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
    inputs = statistic.count_inputs(param.shape)
    if is_traced(statistic.count):
        return
    rows = int(np.min(np.asarray(statistic.count)))
    if rows < inputs:
        remedy = "Weights that the data leave free stay near those of the pruner."
        if damping:
            remedy = f"What the data do not say, damping = {damping} decides."
        warn(
            f"The statistic of {name!r} has {rows} rows for {inputs} inputs, so that its Gram "
            f"matrix is singular. {remedy} More calibration data would say more."
        )


def check_solution(solution: PyTree, label: str, name: str, param: jax.Array) -> None:
    """Raises a ValueError unless a solution is the weights of a parameter and their mask.

    Args:
      solution: the solution.
      label: the pruner or refit that returned the solution.
      name: the name of the parameter.
      param: the parameter.
    """
    start = f"{label} must return (weights, mask) of {name!r}"
    if (
        not isinstance(solution, tuple)
        or len(solution) != 2
        or any(np.shape(x) != param.shape for x in solution)
    ):
        description = reprlib.repr(solution)
        if isinstance(solution, tuple):
            description = str(jax.tree.map(np.shape, solution))
        elif trees.is_array(solution):
            description = f"one array of shape {solution.shape}"
        raise ValueError(f"{start}, each of shape {param.shape}, got {description}.")
    weights, mask = (getattr(x, "dtype", type(x).__name__) for x in solution)
    is_complex = jnp.issubdtype(param.dtype, jnp.complexfloating)
    weights_type = jnp.inexact if is_complex else jnp.floating
    if isinstance(weights, str) or not jnp.issubdtype(weights, weights_type):
        raise ValueError(
            f"{start} with {weights_type.__name__} weights, as the parameter is {param.dtype}, got "
            f"weights of {weights}: the parameter would lose a part of these."
        )
    if isinstance(mask, str) or not is_real(mask):
        raise ValueError(f"{start} with a mask of real numbers, got a mask of {mask}.")


def read_pruned(
    pruned: object, label: str, params: Tree, required: Iterable[KeyPath], may_be_packed: bool
) -> tuple[Tree, Masks]:
    """Returns the params that a hook pruned, in the dtypes of before, and uint8 masks.

    Args:
      pruned: the result of the hook.
      label: the hook, for messages.
      params: tree of parameters before pruning.
      required: paths of the parameters that must have a mask.
      may_be_packed: whether masks may be packed.

    Raises:
      ValueError: the result is no pair of params and masks, or weights or a mask are missing, or
        of another shape or kind.
    """
    if not isinstance(pruned, tuple | list) or len(pruned) != 2:
        raise ValueError(f"{label} must return (params, masks), got {reprlib.repr(pruned)}.")
    weights, params_by_path = map(trees.leaves_by_path, (pruned[0], params))
    if differing := sorted(map(trees.path_string, weights.keys() ^ params_by_path.keys())):
        raise ValueError(
            f"{label} must return a tree of params like that before, and they differ at "
            f"{trees.listed(differing)}."
        )
    masks = read_masks(pruned[1], params, may_be_packed, f"masks of {label}")
    masks_by_path = trees.leaves_by_path(masks)
    if missing := [trees.path_string(path) for path in required if path not in masks_by_path]:
        raise ValueError(f"{label} must return a mask of {trees.listed(missing)}, got None.")

    def read(path: KeyPath, param: jax.Array) -> jax.Array:
        if not trees.is_prunable(param):
            return param
        new_weights: jax.Array = weights[path]
        mask = masks_by_path.get(path, np.broadcast_to(np.uint8(1), param.shape))
        check_solution((new_weights, mask), label, trees.path_string(path), param)
        return new_weights if new_weights.dtype == param.dtype else new_weights.astype(param.dtype)

    return trees.map_matched(read, params), masks


def check_finite(pruned: Params, label: str, params: Params, paths: Iterable[KeyPath]) -> None:
    """Raises a ValueError if a hook made weights that are not finite from weights that are.

    Args:
      pruned: tree of parameters after pruning.
      label: the hook, for messages.
      params: tree of parameters before pruning.
      paths: paths of the parameters that the hook may have changed.
    """
    weights, old_weights = map(trees.leaves_by_path, (pruned, trees.prunable(params)))
    for path in filter(old_weights.__contains__, paths):
        if not is_finite(weights[path]) and is_finite(old_weights[path]):
            raise ValueError(
                f"{label} must return finite weights of {trees.path_string(path)!r}, as they are "
                "before, got NaN or infinities."
            )
