"""Checks of fields, arguments, masks and hooks; warnings of training that stands still."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity import masks as masks_lib
from sparsity.core import trees
from sparsity.core.checks import (
    check_bool,
    check_function,
    check_int,
    check_values,
    is_traced,
    warn,
)
from sparsity.core.names import suggest
from sparsity.core.sharding import abstract, evaluate_now
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.masks import Sites
from sparsity.patterns import SparsityType
from sparsity.programs.optimizers import find_frozen
from sparsity.sparsity_schedules import check_schedule, has_updates, update_range
from sparsity.training.hooks import KeepsCount, StepInputs, UpdaterHooks
from sparsity.training.inner import check_static_counts
from sparsity.training.state import SparseState, check_no_state, check_optax_state


def check_names(cls: type, names: Iterable[str]) -> None:
    """Raises a TypeError for a name that is no field of the class, and suggests the nearest."""
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # a custom __init__, which checks its arguments
    for name in names:
        if name not in parameters:
            hint = suggest("use_packed_masks" if name == "is_packed" else name, list(parameters))
            raise TypeError(f"{cls.__name__} has no argument {name!r}. {hint}")


def check_common_fields(updater: UpdaterHooks) -> None:
    """Raises a ValueError that names an invalid field of `UpdaterHooks` and its value."""
    pattern, scope, seed = updater.sparsity_type, updater.scope, updater.rng_seed
    seed_dtype: PyTree = getattr(seed, "dtype", None)
    distribution, name = updater.sparsity_distribution_fn, type(updater).__name__
    is_array = isinstance(seed, jax.Array | np.ndarray)
    kinds = jax.dtypes.prng_key, np.integer
    for field, is_valid, expected in [
        (
            "sparsity_type",
            isinstance(pattern, SparsityType) or _is_function(pattern),
            "a pattern such as NByM(2, 4), or a function of (path, param)",
        ),
        (
            "sparsity_distribution_fn",
            distribution is None or _is_function(distribution),
            "a function of params or None, for example Uniform(0.8)",
        ),
        (
            "scope",
            not isinstance(scope, type) and masks_lib.find_missing_scope_method(scope) is None,
            "a scope such as Layerwise(), Global() or Coupled(graph)",
        ),
        (
            "rng_seed",
            not is_array or any(jnp.issubdtype(seed_dtype, kind) for kind in kinds),
            "an integer or a random key",
        ),
        (
            "keeps_count",
            updater.keeps_count in get_args(KeepsCount),
            f"one of {get_args(KeepsCount)}",
        ),
    ]:
        if not is_valid:
            value = getattr(updater, field)
            raise ValueError(f"{name}.{field} must be {expected}, got {field} = {value!r}.")
    if not is_array:
        check_int("rng_seed", seed)
    check_schedule(updater.scheduler)
    check_function("topk_fn", updater.topk_fn, "(scores, sparsity)", optional=True)
    for field in ("skip_gradients", "is_sparse_gradients", "use_packed_masks", "use_compact_state"):
        check_bool(field, getattr(updater, field))
    if updater.is_sparse_updates is not None:
        check_bool("is_sparse_updates", updater.is_sparse_updates)
    if not callable(updater.batch_axes):
        check_int("batch_axes", updater.batch_axes, 0)
    scope.check(pattern, updater.batch_axes, updater.topk_fn)
    if updater.use_compact_state:
        check_static_counts(updater, has_masks=True)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def check_optimizer(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a transformation of optax."""
    if isinstance(value, type) or not (hasattr(value, "init") and hasattr(value, "update")):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation such as optax.adam(1e-3), got {name} "
            f"= {value!r}."
        )


def check_masks_and_state(
    masks: Masks,
    opt_state: optax.OptState | None,
    tx: optax.GradientTransformation | None,
    may_hold_masks: bool,
) -> None:
    """Raises a ValueError if masks, state and optimizer are missing, traced or confused.

    `may_hold_masks` as in `check_optax_state`.
    """
    if masks is None:
        raise ValueError("masks is None: no entry would be removed. Give the masks of params.")
    check_no_state(masks)
    check_values("masks", masks, "Call this function outside of jit, scan and vmap.")
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError("opt_state is an optimizer: give its state, and the optimizer as tx.")
    if tx is not None:
        check_optimizer("tx", tx)
    if tx is not None and opt_state is None:
        raise ValueError("tx is checked with the optimizer's state: give opt_state, too.")
    check_optax_state(opt_state, tx, may_hold_masks)


def read_state(tx: optax.GradientTransformation, params: Params, state: PyTree) -> PyTree:
    """Returns a state of `tx`, also from a SparseState; raises a ValueError for another's."""
    expected = trees.leaves_by_path(jax.eval_shape(tx.init, params)).keys()
    if (
        isinstance(state, SparseState)
        and trees.leaves_by_path(state.inner_state).keys() == expected
    ):
        return state.inner_state
    if differing := expected ^ trees.leaves_by_path(state).keys():
        raise ValueError(
            f"opt_state is no state of tx for these params: {trees.list_paths(differing)} differ. "
            "Give the state that tx.init(params) starts, or an update of it."
        )
    return state


def check_sparse_state(state: object) -> None:
    """Raises a ValueError unless a wrapped optimizer made the state."""
    if not isinstance(state, SparseState):
        raise ValueError(
            "The state of a wrapped optimizer is a SparseState, as its `init` returns; got a state "
            f"of type {type(state).__name__}. A chain takes the state of the chain."
        )


def check_gradients(grads: PyTree, params: Params, masks: Masks) -> None:
    """Raises a ValueError that names a parameter without a gradient, or of another model.

    A masked parameter needs a gradient of its shape; that of others may be `None`.
    """
    likes = trees.leaves_by_path(params)
    masks_lib.check_complete(params, grads, "gradients", "the gradients of all parameters")

    def check(path: trees.KeyPath, grad: chex.Array, mask: chex.Array | None) -> None:
        if mask is not None and jnp.shape(grad) != likes[path].shape:
            raise ValueError(
                f"The gradient of {trees.path_string(path)!r} has shape {jnp.shape(grad)}, but its "
                f"parameter has shape {likes[path].shape}."
            )

    trees.map_matched(check, grads, masks, role="gradients")


def check_algorithm_state(updater: UpdaterHooks, state: SparseState, inputs: StepInputs) -> None:
    """Raises a ValueError if an updater starts with an `algorithm_state`, which the state lacks."""
    init = functools.partial(inputs.call, updater.init_algorithm_state)
    if jax.eval_shape(init, inputs.masked_weights, state.masks) is not None:
        raise ValueError(
            f"{type(updater).__name__} has an algorithm_state, and that of the state is None: "
            "another algorithm made the state. Start a new one, tx.init(params), or give this "
            "one state._replace(algorithm_state=updater.init_algorithm_state(params, masks))."
        )


def check_masked(
    updater: UpdaterHooks, hook: str, masks: Masks, params: Params, targets: Sparsities
) -> None:
    """Raises a ValueError that names a parameter to prune for which a hook returned no mask."""
    scope = masks_lib.adapt_scope(updater.scope, updater.sites(params))
    paths = scope.masked_paths(params, targets) - trees.leaves_by_path(masks).keys()
    if paths:
        raise ValueError(
            f"{type(updater).__name__}.{hook} returned no mask for {trees.list_paths(paths)}. "
            "Return an array for each parameter that has a target, None for the others."
        )


def read_new_masks(masks: Masks, old: PyTree, params: Params, may_be_packed: bool) -> Masks:
    """Returns the masks of a hook in the containers of the old masks.

    Raises:
      ValueError: a leaf gained or lost a mask by the update. The message names the leaf.
    """
    masks = masks_lib.read_masks(masks, params, may_be_packed, "new masks")
    new_paths, old_paths = (trees.leaves_by_path(tree).keys() for tree in (masks, old))
    if differing := new_paths ^ old_paths:
        raise ValueError(
            "A mask update must return masks for the leaves that had one before; "
            f"{trees.list_paths(differing)} differ. Return None where target_sparsities has None, "
            "and an array elsewhere."
        )
    return trees.map_matched(lambda _, before, mask: mask, old, masks)


def read_user_masks(
    updater: UpdaterHooks, masks: Masks, state: SparseState, params: Params, sites: Sites
) -> SparseState:
    """Returns the first state with masks of a user, and a target for each leaf with a mask."""
    with evaluate_now():
        masks = jax.tree.map(lambda x: x != 0 if jnp.iscomplexobj(x) else x, masks)
    read = masks_lib.read_masks(masks, params, updater.use_packed_masks, "masks of wrap_optax")
    first = masks_lib.place_masks(read, params)

    def read_target(path: trees.KeyPath, _: PyTree, mask: PyTree, target: PyTree) -> PyTree:
        if mask is None or target is not None:
            return None if mask is None else target
        masks_lib.check_user_mask(updater.scope, sites, path)
        return 1 - jnp.mean(mask, dtype=jnp.float32)

    first = trees.map_matched(lambda _, param, mask: mask, params, first)
    targets = trees.map_matched(read_target, params, first, state.target_sparsities)
    is_fixed = updater.keeps_count == "exact" and not updater.regrows
    if has_updates(updater.scheduler) and not is_fixed:
        check_movable(updater, sites, masks, params)
    return state._replace(masks=first, target_sparsities=targets)


def check_movable(updater: UpdaterHooks, sites: Sites, masks: Masks, params: Params) -> None:
    """Raises a ValueError if masks keep parts of what an update keeps or removes together.

    A pattern counts a unit as kept if the mask keeps any of its entries, and `Coupled` a channel:
    an update of a random mask of half of the entries would keep nearly all blocks.

    Args:
      updater: the updater.
      sites: sites of the parameters.
      masks: tree of masks, perhaps packed; traced ones, and those of other processes, pass.
      params: tree of parameters.
    """
    if any(
        is_traced(x) or not getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(masks)
    ):
        return
    shapes = trees.prunable(abstract(params))
    with evaluate_now():
        bits = masks_lib.read_masks(jax.device_get(masks), shapes, updater.use_packed_masks)
        completed = jax.device_get(_complete_units(updater, sites, bits, shapes))
    complete = trees.leaves_by_path(completed)
    for path, mask in trees.leaves_by_path(jax.device_get(bits)).items():
        if path not in complete or (complete[path] > mask).any():
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} among the masks of wrap_optax keeps "
                f"parts of what {type(updater).__name__} keeps or removes together, and would keep "
                "more weights. Leave masks out, or give masks of its pattern and scope, such as "
                "those of MagnitudePruning(...).instant_sparsify(params)."
            )


def _complete_units(updater: UpdaterHooks, sites: Sites, masks: Masks, shapes: PyTree) -> Masks:
    """Returns masks with every unit or channel of which a mask keeps a part."""
    if isinstance(updater.scope, masks_lib.TreeScope):
        scores = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), shapes)
        return masks_lib.adapt_scope(updater.scope, sites).move_tree(masks, scores, scores, 0.0)

    def complete(path: trees.KeyPath, mask: jax.Array) -> jax.Array:
        if path not in sites or not updater.regrows or updater.keeps_count != "exact":
            return mask
        pattern, axes = sites[path].pattern, sites[path].batch_axes
        if pattern.is_elementwise or not pattern.ranks_units:
            return mask
        pattern.check(mask.shape, axes, sites[path].name)
        pooled = masks_lib.are_kept(pattern.pool(mask, axes))
        return masks_lib.are_kept(pattern.expand(pooled, mask.shape, axes))

    return trees.map_matched(complete, masks)


def exclude_frozen(
    updater: UpdaterHooks,
    inner: optax.GradientTransformation,
    params: Params,
    user_masks: Masks | None,
    sites: Sites,
) -> Sites:
    """Returns the sites without parameters that the inner optimizer never moves; warns of these.

    With masks of the user all sites stay: such masks may prune any parameter.

    Raises:
      ValueError: masks of the user would move. The message names the parameters.
    """
    frozen = find_frozen(inner, params)
    if not frozen:
        return sites
    if user_masks is not None:
        masked = frozen & trees.leaves_by_path(user_masks).keys()
        if masked and has_updates(updater.scheduler):
            raise ValueError(
                f"Give None in the masks of wrap_optax for {trees.list_paths(masked)}, which the "
                "inner optimizer never moves, or set no scheduler: a weight that returned to a "
                "mask would stay 0."
            )
        return sites
    targets = updater.compute_targets(params, sites)
    find_masked = masks_lib.adapt_scope(updater.scope).masked_paths
    excluded, kept_dense = set[trees.KeyPath](), set[trees.KeyPath]()
    for path in trees.leaves_by_path(targets):
        alone = trees.map_matched(
            lambda each, target, path=path: target if each == path else None, targets
        )
        # A scope of channels also masks what goes with the channels of a parameter.
        if affected := frozen & {path, *find_masked(params, alone)}:
            excluded.add(path)
            kept_dense |= affected
    if excluded:
        warn(
            f"Prune {trees.list_paths(kept_dense)} outside of training, by instant_sparsify, or "
            "leave out what is frozen with filter_fn or custom_sparsity_map={path: None}: the "
            "inner optimizer never moves these parameters, so that they stay dense, and so do "
            f"{trees.list_paths(excluded)}."
        )
    return sites.without(excluded) if excluded else sites


def warn_of_idle(
    updater: UpdaterHooks, params: Params, targets: Sparsities, masks: Masks, starts_dense: bool
) -> None:
    """Warns of masks that are missing or never move, and of weights that no step would train.

    Args:
      updater: updater of the masks.
      params: tree of parameters.
      targets: tree of target sparsities.
      masks: tree of the first masks.
      starts_dense: whether traced masks, whose values are unknown, count as all ones.
    """
    steps, scheduler = update_range(updater.scheduler), f"scheduler = {updater.scheduler!r}"
    name, leaves = type(updater).__name__, jax.tree.leaves(masks)
    remedy = "or start from masks with wrap_optax(tx, masks=masks)."
    if steps is None:
        prunes = any(is_traced(t) or jax.device_get(t) > 0 for t in jax.tree.leaves(targets))
        if not leaves or not prunes:
            return
        if all(starts_dense if is_traced(x) else np.all(jax.device_get(x)) for x in leaves):
            warn(
                f"{name} has target sparsities, but all masks are ones and {scheduler} never "
                "updates them: training stays dense. Set a scheduler, for example "
                "PolynomialSchedule(update_freq=100, update_start_step=1_000, "
                "update_end_step=10_000) (update_freq, update_start_step and update_end_step in a "
                f"configuration), {remedy}"
            )
        elif updater.schedule_type == "periodic":
            warn(
                f"{name} moves masks, but {scheduler} never updates them: the first masks stay. "
                "Set a scheduler, for example PeriodicSchedule(update_freq=100) (update_freq in a "
                "configuration), or train within fixed masks with StaticRandomSparse."
            )
        return
    has_no_target = updater.get_distribution_fn() is not None and not jax.tree.leaves(targets)
    if has_no_target and not leaves and _has_matrices(updater, params):
        warn(
            f"{name} has {scheduler}, but no parameter has a target sparsity: training stays "
            f"dense. Set sparsity_distribution_fn, for example Uniform(0.8), {remedy}"
        )
    start, end = steps
    last = start + 3 if end is None else end
    samples = {start, start + 1, (start + last) // 2}
    is_update = updater.scheduler.is_mask_update_iter
    if updater.skip_gradients and last > start + 1 and all(map(bool, map(is_update, samples))):
        warn(
            f"{name} skips the gradients of steps that update masks, and {scheduler} updates them "
            f"in every step from {start} {'on' if end is None else f'to {end}'}: no weight is "
            "trained then. Set a larger update_freq, or skip_gradients=False."
        )


def _has_matrices(updater: UpdaterHooks, params: Params) -> bool:
    """Returns whether a parameter has more than one axis beyond its batch axes."""
    weights = trees.leaves_by_path(trees.prunable(params))
    return any(
        param.ndim - masks_lib.leading_axes(updater.batch_axes, trees.path_names(path), param) > 1
        for path, param in weights.items()
    )
