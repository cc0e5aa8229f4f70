"""`sparsity.shrink`: a model without its dead channels, and the optimizer's state with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, Sharding

from sparsity import masks as masks_lib
from sparsity.core import extras, owners, sharding, trees
from sparsity.core.checks import check_kind, is_traced
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree, Tree
from sparsity.graph import Coupled, Graph
from sparsity.graph.groups import solve_kept_indices
from sparsity.masks.slice_layout import check_entries
from sparsity.programs.axes import AxisIndex, Variable
from sparsity.programs.optimizers import Removed, States, check_entrywise
from sparsity.reports import time_in_turn
from sparsity.shrinking.dead import find_dead
from sparsity.shrinking.interpreter import take
from sparsity.shrinking.plan import Plan, cut_shape, plan_cut, solve_proven_indices
from sparsity.sparsity_schedules import NoUpdateSchedule, find_last_update, has_updates
from sparsity.training.base_updater import BaseUpdater, WrappedOptimizer
from sparsity.training.checks import check_masks_and_state, read_state
from sparsity.training.hooks import keeps_dense_weights
from sparsity.training.inner import KeptState
from sparsity.training.state import SparseState, get_sparse_state

Indices: TypeAlias = Mapping[AxisIndex, np.ndarray]  # {axis: the indices that stay}

_REMEDY = "start a new state: shrink without opt_state, then tx.init(small.params)"


def shrink(
    graph: Graph,
    params: Tree,
    masks: Masks | Plan,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
) -> Small[Tree]:
    """Removes dead channels from the parameters, the model and the optimizer's state.

    A channel is dead if the masked model provably computes the same without it: all entries that
    read the channel are masked, or all that compute it are, and its readers read 0. Cutting one may
    leave others dead. Other entries keep their masks. The smaller model computes exactly what the
    masked model computes, also gradients of kept entries. Training continues from its state.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced, or a part of that tree.
      masks: masks of any pattern, not packed, `None` if dense; or a `Plan`. Layers of a scan keep
        equally many channels, dead ones included. A group that masks remove as a whole vanishes
        with its branch; one channel stays where the model reduces over them.
      opt_state: state of any optax optimizer of `params`. Moments are cut like their parameters,
        counters and schedules stay, and a SparseState keeps the masks of all entries that stay.
        Factored moments that average over removed channels are refused.
      tx: the optimizer of that state, to train on with `small.tx`; or the inner one of a
        SparseState. The program of its update must prove that training continues as on the masked
        model. Entrywise optimizers pass, and norms to which removed entries add 0
        (`clip_by_global_norm`, `lars`). Means over an array (`clip_by_block_rms`), noise, factored
        moments, factors that depend on the shape (`muon`) and norms of moments that removed entries
        still have (`lamb`) are refused. Without `tx` you vouch for the optimizer.

    Raises:
      ValueError: params lack a parameter, masks are traced or of another model, hold other entries
        than 0 and 1, the state cannot be cut, or no proof is found for `tx`.

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsity.graph import trace
      >>> params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
      >>> graph = trace(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, jnp.ones((5, 3)))
      >>> masks = {"up": params["up"].at[:, 1].set(0), "down": params["down"].at[1].set(0)}
      >>> small = shrink(graph, params, masks)
      >>> jax.tree.map(jnp.shape, small.params)
      {'down': (3, 2), 'up': (3, 3)}
      >>> small.apply(small.params, jnp.ones((5, 3))).shape
      (5, 2)
    """
    check_kind("graph", graph, Graph, "made by sparsity.trace")
    check_masks_and_state(masks, opt_state, tx, may_hold_masks=True)
    graph.parameters.check_complete(params)
    plan, by_path = _read_plan(graph, masks)
    cuts = _list_cuts(graph, params, plan.kept, by_path)
    small_params = _cut_params(cuts, params)
    small_masks = _cut_masks(cuts, small_params)
    state = None if opt_state is None else _cut_state(cuts, params, opt_state)
    if tx is not None:
        _check_optimizer(tx, *trees.strip_variables((params, opt_state)), cuts)
        tx = _convert_optimizer(tx, plan, state)
    replicated = _find_replicated(graph, params, small_params)
    masked = masks_lib.apply_masks(small_params, small_masks)
    return Small(masked, state, plan, graph, replicated, small_masks, tx)


def _convert_optimizer(
    tx: optax.GradientTransformation, plan: Plan, small_state: PyTree
) -> optax.GradientTransformation:
    """Returns the optimizer of the smaller model: a wrapped one, whose updater knows the cut."""
    if not isinstance(tx, WrappedOptimizer) or tx.updater is None or tx.inner is None:
        return tx
    masks = None if tx.masks is None else get_sparse_state(small_state).masks
    return plan.updater(tx.updater).wrap_optax(tx.inner, masks)


def _read_plan(graph: Graph, masks: Masks | Plan) -> tuple[Plan, dict[Path, jax.Array]]:
    """Returns a checked plan of the channels that masks remove, and the masks by path."""
    if isinstance(masks, Plan):
        solve_proven_indices(graph, masks)  # raises for a plan of another model
        return masks, {}
    by_path = {x.path: mask for x, mask in graph.parameters.match_masks(masks)}
    for path, mask in by_path.items():
        check_entries(np.asarray(mask), trees.join_names(path))
    return plan_cut(graph, *find_dead(graph, by_path)), by_path


def _find_replicated(graph: Graph, params: Params, cut: Params) -> dict[tuple[Path, int], int]:
    """Returns the attribute `replicated` of a `Small`."""
    parameters, small = graph.parameters.match(params), trees.leaves_by_path(cut)
    replicated = {}
    for key_path, leaf in trees.leaves_by_path(params).items():
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            counts = sharding.count_devices(leaf.sharding, leaf.ndim)
            for axis, pair in enumerate(zip(small[key_path].shape, counts, strict=True)):
                if pair[0] != leaf.shape[axis] and pair[0] % pair[1]:
                    replicated[parameters[key_path].path, axis] = pair[1]
    return replicated


@dataclasses.dataclass(frozen=True, eq=False)
class Small(Generic[Tree]):
    """A smaller model. Made by `shrink`.

    Attributes:
      params: the parameters, the same tree with smaller arrays; 0 where `masks` are.
      opt_state: the optimizer's state, cut like the parameters; `None` without `opt_state`.
      plan: the channels that stay; `plan.to_json()` cuts another checkpoint of the model.
      before: the graph of the model before the cut.
      replicated: {(path, axis): number of devices} where that number no longer divides the axis.
      masks: uint8 masks of `params`, 1 where an entry stays; `None` for a parameter without masked
        entries, as all are after a cut by a plan.
      tx: the optimizer of `opt_state`, `None` without `tx`. A result of `wrap_optax` is wrapped
        again by an updater that knows the cut; the inner optimizer of a SparseState goes with
        `opt_state.inner_state`.
      graph: the graph of the smaller model.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"up": jnp.array([[1.0, 5.0]]), "down": jnp.array([[2.0], [3.0]])}
      >>> masks = {"up": jnp.array([[0, 1]]), "down": jnp.array([[0], [1]])}
      >>> def model(params, x):
      ...     return x @ params["up"] @ params["down"]
      >>> graph = sparsity.trace(model, params, jnp.ones((1, 1)))
      >>> small = sparsity.shrink(graph, params, masks)
      >>> small.params["up"], small.apply(small.params, jnp.ones((1, 1)))
      (Array([[5.]], dtype=float32), Array([[15.]], dtype=float32))
    """

    params: Tree
    opt_state: PyTree
    plan: Plan
    before: Graph
    replicated: Mapping[tuple[Path, int], int]
    masks: Masks = None
    tx: optax.GradientTransformation | None = None

    @functools.cached_property
    def graph(self) -> Graph:
        """Graph of the smaller model, traced at first use; its channels can be cut again."""
        return self.plan.graph(self.before)

    def apply(self, params: Params, *args: PyTree) -> PyTree:
        """Runs the model at its smaller size: returns `fn(params, *args)` of the masked model.

        Can be compiled, differentiated, mapped and exported like `fn`, at any batch size.

        Args:
          params: the smaller parameters.
          *args: inputs of the model.
        """
        return self.plan.apply(self.before, params, *args)

    def updater(self, updater: BaseUpdater) -> BaseUpdater:
        """Converts an updater of the model before the cut for this model: see `Plan.updater`."""
        return self.plan.updater(updater)

    def macs(self, path: Path | None = None) -> int:
        """Counts multiply-adds at the batch size of the trace: of a call, or of one parameter.

        Raises:
          ValueError: the model has no parameter of this path, which is a tuple of strings.
        """
        paths = [parameter.path for parameter in self.before.parameters]
        if path is not None and path not in paths:
            raise ValueError(f"path must be one of {paths}, got path = {path!r}.")
        return round(self.before.costs.count_small_macs(self._sizes, path))

    def measure(self, params: Params, *args: PyTree, rounds: int = 20) -> list[float]:
        """Measures the model before and after the cut, both compiled and called in turn.

        Args:
          params: the parameters before the cut, which `shrink` took.
          *args: inputs of the model.
          rounds: number of calls of each model.

        Returns:
          Median seconds of a call before and after the cut: an entry of `report`.

        Raises:
          ValueError: the parameters are those after the cut, or of another model.
        """

        def make_program(plan: Plan, params: Params) -> Callable[[], object]:
            arrays, rebuild = trees.split_arrays((params, args))

            @jax.jit
            def run(arrays: list[jax.Array]) -> object:
                params, inputs = rebuild(arrays)
                return plan.apply(self.before, params, *inputs)

            return functools.partial(run, arrays)

        self.before.parameters.match(params, may_be_smaller=False)
        full = make_program(Plan({}, {}), params)
        return time_in_turn(full, make_program(self.plan, self.params), rounds=rounds)

    def report(self, seconds: Mapping[str, Sequence[float]] | None = None) -> str:
        """Returns a table of shapes, sizes, bytes and MACs before and after, by parameter.

        Args:
          seconds: measured times shown below the table, `{name: (before, after)}`, as `measure` and
            `sparsity.reports.time_in_turn` return them.

        Returns:
          Text of several lines.
        """
        seconds = seconds or {}
        check_kind("seconds", seconds, Mapping, "a dict {name: (before, after)}")
        densities = {}
        for path, mask in trees.leaves_by_names(self.masks).items():
            parameter = self.before.parameters.find(path, mask, may_be_smaller=True)
            densities[parameter.path] = f"{np.count_nonzero(mask) / mask.size:.3g}"
        columns = ["entries", "left", "bytes", "left", "MACs", "left", "density"]
        columns = columns if densities else columns[:-1]
        table = extras.make_table(("parameter", "shape", "smaller"), columns)
        totals = np.zeros(6, object)

        def add_row(names: Sequence[str], numbers: Sequence[int], density: str = "") -> None:
            cells = (*names, *(f"{n:,}" for n in numbers), density)
            table.add_row(*cells if densities else cells[:-1])

        for x in self.before.parameters:
            shape = self.plan.shrink_shape(x.path, x.shape)
            size = math.prod(shape)
            nbytes = [n * x.dtype.itemsize for n in (x.size, size)]
            macs = self.before.costs.count_macs(x.path), self.macs(x.path)
            numbers = (x.size, size, *nbytes, *macs)
            totals += numbers
            names = (x.name, trees.shape_text(x.shape), trees.shape_text(shape))
            add_row(names, numbers, densities.get(x.path, ""))
        table.add_section()
        # Products of two parameters count once in the sum of all.
        add_row(("all", "", ""), (*totals[:4], self.before.macs(), self.macs()))
        parts = [extras.as_text(table), *self._list_notes()]
        if seconds:
            times = extras.make_table(("time",), ("before", "after", "ratio"))
            for name, pair in seconds.items():
                milliseconds = [f"{1000 * x:.3g} ms" for x in pair]
                times.add_row(name, *milliseconds, f"{pair[1] / pair[0]:.2f}")
            parts.append(extras.as_text(times))
        return "\n\n".join(parts)

    def _list_notes(self) -> list[str]:
        notes = []
        if self.replicated:
            names = [f"{trees.join_names(path)}:{axis}" for path, axis in self.replicated]
            notes.append(
                f"{trees.listed(names)}: the remaining entries do not divide among the devices "
                "of the mesh, and are replicated. "
                f"Coupled(round_to={math.lcm(*self.replicated.values())}) keeps it sharded."
            )
        if self.tx is not None:
            notes.append("The optimizer continues as on the masked model, by its program.")
        elif self.opt_state is not None:
            notes.append(
                "Whether the optimizer continues as on the masked model was not checked: shrink("
                "..., opt_state, tx) proves it from the program of the update."
            )
        return notes

    @functools.cached_property
    def _sizes(self) -> dict[Variable, int]:
        """Sizes of the variables that lose entries."""
        removal = self.before.removal
        axes = removal.list_parameter_axes()
        kept_indices = solve_kept_indices(axes, self.plan, removal.may_be_empty)
        return {variable: index.shape[-1] for variable, index in kept_indices.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _CutParameter:
    """A parameter that is cut, the owner of leaves of an optimizer's state.

    Attributes:
      name: its path in a tree of params.
      param: the parameter before the cut.
      axes: {axis: the indices that stay}, of axes that lose some.
      mask: its mask, `None` for a dense parameter.
    """

    name: str
    param: jax.Array
    axes: Indices
    mask: jax.Array | None = None

    def with_entries(self) -> _CutParameter:
        """Returns the cut that keeps an index of each axis that loses all."""
        first = {
            i: x if x.size else np.zeros((*x.shape[:-1], 1), int) for i, x in self.axes.items()
        }
        return dataclasses.replace(self, axes=first)

    def cut(self, array: jax.Array) -> jax.Array:
        """Cuts an array of the parameter's shape."""
        return _cut_array(array, self.axes)

    def read_removed(self, array: jax.Array, is_masked: bool) -> np.ndarray | None:
        """Returns the entries that the cut removes from an array, `None` if they have no value.

        Args:
          array: an array of the parameter's shape.
          is_masked: whether to return entries that are masked, or those that are not.
        """
        if is_traced(array):
            return None
        places = np.arange(array.size).reshape(array.shape)
        for axis, index in sorted(self.axes.items()):
            places = take(places, index, axis)
        is_removed: np.ndarray = np.ones(array.size, bool)
        is_removed[places.reshape(-1)] = False
        mask = np.ones(array.shape) if self.mask is None else np.asarray(self.mask)
        is_chosen = is_removed & ((mask.reshape(-1) == 0) == is_masked)
        return np.asarray(array).reshape(-1)[is_chosen]


_Cuts: TypeAlias = Mapping[KeyPath, _CutParameter]  # by key path in a tree of params


def _list_cuts(
    graph: Graph, params: Params, kept: Mapping[Path, Indices], masks: Mapping[Path, jax.Array]
) -> _Cuts:
    """Returns the cut of each parameter, by its key path in a tree of params.

    Args:
      graph: the graph of the model.
      params: the parameters, or a part of their tree.
      kept: {path in the graph: {axis: the indices that stay}}.
      masks: {path in the graph: mask}.
    """
    paths = {key: x.path for key, x in graph.parameters.match(params, may_be_smaller=False).items()}
    return {
        key_path: _CutParameter(trees.path_string(key_path), leaf, kept.get(x, {}), masks.get(x))
        for key_path, leaf in trees.leaves_by_path(params).items()
        if (x := paths.get(key_path)) is not None
    }


def _cut_params(cuts: _Cuts, params: Tree) -> Tree:
    """Cuts parameters, or a tree like them; leaves that are not arrays stay."""
    return trees.map_matched(
        lambda key_path, leaf: cuts[key_path].cut(leaf) if key_path in cuts else leaf, params
    )


def _cut_masks(cuts: _Cuts, small_params: Params) -> Masks:
    """Cuts the masks: uint8, placed like the smaller parameters.

    The mask of a parameter without masked entries is `None`.
    """

    def cut(key_path: KeyPath, leaf: jax.Array) -> jax.Array | None:
        mask = cuts[key_path].mask
        if mask is None:
            return None
        kept = masks_lib.are_kept(cuts[key_path].cut(mask))
        if np.asarray(kept).all():
            return None
        return kept if is_traced(leaf) else sharding.place_like(leaf, kept)

    with sharding.evaluate_now():  # parameters may be traced, masks are not
        return trees.map_matched(cut, trees.only_arrays(small_params))


def _cut_state(cuts: _Cuts, params: Params, state: PyTree) -> PyTree:
    """Cuts the leaves of an optimizer's state that belong to cut parameters.

    Raises:
      ValueError: a leaf cannot be cut, or the state belongs to other parameters; the error names
        the leaf.
    """
    if trees.find_nodes(state, KeptState):
        raise ValueError(
            "opt_state is that of use_compact_state=True, whose arrays of kept weights do not tell "
            f"channels: {_REMEDY}."
        )

    owner_tree = trees.map_matched(lambda key_path, _: cuts.get(key_path), params)
    changed = {key_path: cut.param.shape for key_path, cut in cuts.items() if cut.axes}
    owners.check_state(owner_tree, state, _REMEDY, changed)
    return owners.map_owned(_cut_leaf, owner_tree, state)


def _check_optimizer(
    tx: optax.GradientTransformation, params: Params, opt_state: PyTree, cuts: _Cuts
) -> None:
    """Raises a ValueError unless an optimizer trains the smaller parameters as the masked ones.

    Entries that are removed without a mask have no gradient: the model is proved to be the same for
    all of their values. Those of masked entries are masked, unless `tx` has masks itself.
    """
    params = trees.only_arrays(params)
    state = read_state(tx, params, opt_state)
    remedy = "Leave out tx to cut the state without a proof"
    has_masks = bool(trees.find_nodes(state, SparseState))
    if isinstance(tx, WrappedOptimizer) and tx.updater is not None and tx.inner is not None:
        tx = _fix_masks(tx.updater, tx.inner, state)
        if masks_lib.are_packed(state.masks, params):
            state = state._replace(masks=masks_lib.unpack_masks(state.masks, params))
    elif has_masks:
        remedy = (
            "Wrap last, as in pruner.wrap_optax(optax.chain(...)), or leave out tx and make the "
            "optimizer again with small.updater(pruner)"
        )

    def remove(is_masked: bool) -> Removed:
        return Removed(
            are_zero=is_masked and not has_masks,
            have_gradients=is_masked and has_masks,
            read=lambda path, array: cuts[path].read_removed(array, is_masked),
        )

    # jax traces other programs for arrays without entries: the proof has one channel of these.
    twins = {key_path: cut.with_entries() for key_path, cut in cuts.items()}
    check_entrywise(
        tx,
        params,
        _cut_params(twins, params),
        [remove(is_masked=True), remove(is_masked=False)],
        remedy=remedy,
        claim="tx might train the smaller model otherwise than the masked one.",
        states=States(state, _cut_state(twins, params, state)),
    )


def _fix_masks(
    updater: BaseUpdater, inner: optax.GradientTransformation, state: SparseState
) -> optax.GradientTransformation:
    """Returns a wrapped optimizer whose masks stay, and are not packed.

    Raises:
      ValueError: later updates of the masks may choose among removed channels, too.
    """
    name, last = type(updater).__name__, find_last_update(updater.scheduler)
    are_final = not has_updates(updater.scheduler)
    are_final |= last is not None and not is_traced(state.count) and int(state.count) > last
    # A pruned weight that is 0 and never returns leaves the choice to what remains.
    removes_only = not updater.regrows
    removes_only &= not keeps_dense_weights(updater)
    if not are_final and not (removes_only and isinstance(updater.scope, Coupled)):
        raise ValueError(
            "Give the inner optimizer as tx, and wrap it again for the smaller model: later "
            f"updates of the masks by {name} under scope = {updater.scope!r} may choose otherwise "
            "without the removed channels. Under Coupled a pruner whose pruned weights stay 0 "
            "passes, and any updater does after the last update of its masks."
        )
    still = dataclasses.replace(
        updater, scheduler=NoUpdateSchedule(), scope=masks_lib.Layerwise(), use_packed_masks=False
    )
    return still.wrap_optax(inner)


def _cut_leaf(owner: _CutParameter | None, leaf: jax.Array) -> jax.Array:
    """Cuts a leaf of an optimizer's state; a leaf without an owner stays."""
    if owner is None or not owner.axes or not hasattr(leaf, "shape"):
        return leaf
    shape = owner.param.shape
    if leaf.dtype == np.uint8 and leaf.shape == masks_lib.packed_shape(shape) != shape:
        mask = owner.cut(masks_lib.unpack_masks(leaf, owner.param))
        return masks_lib.place_masks(masks_lib.pack_masks(mask, mask), mask)
    needed = {*owner.axes} | ({0} if any(x.ndim > 1 for x in owner.axes.values()) else set())
    candidates = owners.list_axes(shape, leaf.shape)
    cuts = {tuple(axes.index(x) for x in owner.axes) for axes in candidates if needed <= {*axes}}
    if len(cuts) == 1 and all(needed <= {*axes} for axes in candidates):
        return _cut_array(leaf, dict(zip(cuts.pop(), owner.axes.values(), strict=True)))
    if math.prod(leaf.shape) == 1:  # optimizers write one entry where they keep no moment
        return leaf
    raise ValueError(
        f"opt_state has a leaf of shape {leaf.shape} for {owner.name!r} of shape {shape}, "
        "whose entries join several channels, as factored moments do: the smaller model would "
        f"train otherwise than the masked one. Use a moment for each weight, or {_REMEDY}."
    )


def _cut_array(array: jax.Array, axes: Indices) -> jax.Array:
    """Cuts an array, and keeps its sharding along axes that the mesh still divides."""
    if not axes:
        return array
    axes = dict(sorted(axes.items()))  # a pytree; layers go before the rows of those that stay
    old_sharding = None if is_traced(array) else getattr(array, "sharding", None)
    shape = cut_shape(jnp.shape(array), axes)
    if isinstance(old_sharding, NamedSharding) and not sharding.explicit_sharding(array):
        return _take_all(array, axes, sharding.fit(old_sharding, shape))
    take_all = functools.partial(_take_all, are_bits=old_sharding is not None)
    return sharding.shard_like(array, take_all, array, axes, shape=shape)


@functools.partial(jax.jit, static_argnames=("target", "are_bits"))
def _take_all(
    array: jax.Array, axes: Indices, target: Sharding | None = None, are_bits: bool = True
) -> jax.Array:
    """Takes entries, as integers if they need no derivatives.

    XLA adds zeros of other devices, and -0.0 + 0.0 is 0.0.
    """
    dtype = array.dtype
    if are_bits and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4):
        array = array.view(f"uint{8 * dtype.itemsize}")
    for axis, index in axes.items():
        array = take(array, index, axis)
    array = array.view(dtype) if array.dtype != dtype else array
    return array if target is None else jax.lax.with_sharding_constraint(array, target)
