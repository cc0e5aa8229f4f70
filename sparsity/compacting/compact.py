"""`sparsity.compact`: a model in the memory of the values that its masks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias

import chex
import jax
import numpy as np
import optax

from sparsity.compacting.building import (
    build,
    check_params,
    describe_masked,
    read_formats,
    read_masks_by_path,
)
from sparsity.compacting.formats import ANY_MASK, FORMAT_LAYOUTS
from sparsity.compacting.formats.base import is_kept
from sparsity.compacting.moving import Loss, move_masks
from sparsity.compacting.optimizer_state import (
    StoredParameter,
    StoredTree,
    check_entries,
    densify_kept_states,
    gather_state,
    map_moments,
    unwrap,
)
from sparsity.compacting.stored_model import (
    StoredModel,
    count_bytes,
    make_rows,
    run_stored,
    wrap_values,
)
from sparsity.compacting.table import plot, show_rows
from sparsity.compacting.tune import choose, measure
from sparsity.core import trees
from sparsity.core.checks import check_function, check_kind, check_values, is_traced
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.graph import Graph
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.step_checks import check_masks_and_state, check_optimizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Outside: TypeAlias = Literal["zero", "frozen"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compact(StoredModel, Generic[Tree]):
    """A model whose masked parameters are their kept values. Made by `compact`.

    The model is a pytree. Its leaves are the positions of the values, and frozen entries: pass the
    model to compiled functions as an argument, and save it together with the values. `params`,
    `opt_state` and `tx` are not leaves: on a model that a compiled function,
    `jax.tree.map` or a checkpoint returns, reading them raises an AttributeError.

    Formats of a masked parameter. Slices are layers of scans, and experts if all keep equally many
    entries.

    - 'values': [*stack, k] values in the order of the parameter, padded where layers keep different
      numbers. A product makes the slice dense, in the forward and again in the backward pass:
      bit-equal to the masked model.
    - 'grouped': [*stack, groups, k, group] values of groups of neighbouring outputs that keep the
      same inputs. Products gather inputs, and nothing is made dense: equal up to rounding.
    - 'dense': the parameter itself. Its gradient is 0 outside the mask.

    Attributes:
      indices: tree like the parameters: positions of the kept values, `None` for dense parameters.
      frozen: tree like the parameters: entries outside the masks, `None` for zeros: the
        arrays of `params`.
      graph: the graph of the model.
      layouts: (path, layout) of each masked parameter.
      densifies_one_at_a_time: whether each parameter is made dense only when the inputs of its
        product exist, so that one dense parameter is stored at a time. False on several devices,
        where each wait would send a message between devices.
      start: `params`, `opt_state` and `tx`, by name; no part of the pytree.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0], [0.0, 2.0]])}
      >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, jnp.ones((1, 2)))
      >>> model = sparsity.compact(graph, params, {"w": jnp.eye(2, dtype=jnp.uint8)})
      >>> model.indices, model.params
      ({'w': Array([0, 3], dtype=int32)}, {'w': Array([1., 2.], dtype=float32)})
    """

    @property
    def params(self) -> Tree:
        """The parameters to start from: kept values of masked parameters, and dense parameters.

        A compiled step that donates its arguments deletes these arrays.
        """
        return self.read_start("params")

    @property
    def opt_state(self) -> PyTree:
        """The optimizer's state of `params`, `None` without `opt_state`."""
        return self.read_start("opt_state")

    @property
    def tx(self) -> optax.GradientTransformation | None:
        """The optimizer of `opt_state`, which has no wrapper; `None` without `tx`."""
        return self.read_start("tx")

    @property
    def update_error(self) -> float | None:
        """0.0: `tx` is proved to train kept values as masked parameters; `None` without `tx`."""
        return None if self.tx is None else 0.0

    def __repr__(self) -> str:
        return f"Compact({', '.join(f'{x}: {f!r}' for x, f in self.formats.items()) or 'dense'})"

    def apply(self, params: Params, *args: PyTree) -> PyTree:
        """Runs the model: returns `fn(params, *args)` of the masked model.

        Can be compiled, differentiated in reverse, mapped and exported like `fn`, at any batch
        size. A masked parameter is dense only while an equation reads the parameter.

        Args:
          params: parameters like `self.params`, in any dtype.
          *args: inputs of the model.

        Raises:
          ValueError: parameters are missing or have another shape; the error names the parameter.
        """
        return run_stored(self, params, *args)

    def move(
        self,
        pruner: BaseUpdater,
        params: Params,
        opt_state: optax.OptState,
        count: chex.Numeric,
        loss: Loss | None = None,
        tx: optax.GradientTransformation | None = None,
    ) -> tuple[Compact[Tree], Tree, PyTree]:
        """Moves the masks once, as SET, RigL or SRigL do in a step that updates masks.

        No shape changes. Entries that stay keep values and moments; grown ones start at 0 with the
        state of a new optimizer; counts stay. Masks are those of the wrapped updater for the same
        parameters, gradients and count. The call holds the dense parameters, and a dense gradient
        if there is a `loss`.

        A call within a compiled function becomes a part of the program. Another call is compiled
        once for the same `loss`: give batches as `jax.tree_util.Partial(loss, batch=batch)`.

        Args:
          pruner: SET, RigL, or another updater that keeps the number of entries of each slice.
            Its schedule is not asked, and its hooks get no arguments of a training loop.
          params: parameters like `self.params`.
          opt_state: state of the optimizer of `params`.
          count: number of steps so far, for drop fractions and random numbers.
          loss: `loss(apply, params)` returns a scalar. `apply` is the model, and `params` are dense
            parameters. RigL ranks its gradients; SET needs none.
          tx: the optimizer, for states in which new entries are not 0, as in adagrad.

        Returns:
          The compact model with the new masks, its parameters, and the optimizer's state. The model
          has both as `params` and `opt_state` until a compiled function returns it.

        Raises:
          ValueError: an update may change the number of kept entries of a slice, `outside` is
            'frozen', the state holds no moment for each kept value or needs `tx`, or the loss is no
            real scalar. The error names the argument or the parameter.

        Example:
          >>> import jax.numpy as jnp, optax, sparsity
          >>> params, x = {"w": jnp.array([[1.0], [2.0], [0.0], [0.0]])}, jnp.arange(4.0)[None]
          >>> masks = {"w": jnp.array([[1], [1], [0], [0]], jnp.uint8)}
          >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, x)
          >>> model = sparsity.compact(graph, params, masks)
          >>> pruner = sparsity.RigL(drop_fraction_fn=optax.constant_schedule(0.5))
          >>> state = optax.adam(0.1).init(model.params)
          >>> loss = lambda apply, params: apply(params, x).sum()
          >>> model, params, state = model.move(pruner, model.params, state, 0, loss)
          >>> model.indices, params
          ({'w': Array([1, 3], dtype=int32)}, {'w': Array([2., 0.], dtype=float32)})
        """
        _check_move(pruner, count, loss, tx)
        self._check_movable(params, opt_state)
        positions, params, opt_state = move_masks(self, pruner, params, opt_state, count, loss, tx)
        start = {**self.start, "params": params, "opt_state": opt_state}
        return dataclasses.replace(self, indices=positions, start=start), params, opt_state

    def dense(self, params: Params) -> Tree:
        """Returns the dense parameters; outside the masks they are 0, or frozen."""
        return jax.tree.map(
            lambda leaf: leaf.densify() if is_kept(leaf) else leaf,
            wrap_values(self, params),
            is_leaf=is_kept,
        )

    def dense_state(self, opt_state: optax.OptState) -> PyTree:
        """Returns the optimizer's state of the dense parameters, with moments 0 outside the masks.

        Args:
          opt_state: state of an optimizer of parameters like `self.params`.

        Raises:
          ValueError: a leaf holds no moment for each kept value; the error names the parameter.
        """
        return map_moments(StoredParameter.densify, self.stored_tree, opt_state)

    @property
    def masks(self) -> Masks:
        """Masks like the parameters, uint8, 1 = keep, `None` for dense parameters."""
        layouts = dict(self.layouts)

        def mask(path: trees.KeyPath, positions: jax.Array) -> jax.Array:
            layout = layouts[trees.path_names(path)]
            return layout.make_mask(positions)

        return trees.map_matched(mask, self.indices)

    @property
    def formats(self) -> dict[Path, str]:
        """{path: format} of the masked parameters."""
        return {path: layout.format for path, layout in self.layouts}

    def measure(
        self, params: Params, *args: PyTree, rounds: int = 10
    ) -> dict[Path, dict[str, float]]:
        """Measures the products of each masked parameter in each format, on this device.

        Formats of one parameter are measured in turn, forward and backward, at the sizes of the
        inputs.

        Args:
          params: parameters like `self.params`.
          *args: inputs of the model.
          rounds: number of measurements of each product.

        Returns:
          A dictionary from paths to formats to median seconds, of all possible formats: an argument
          of `report`.
        """
        return measure(self._in_all_formats(self.dense(params)), args, rounds)

    def tune(
        self,
        params: Params,
        *args: PyTree,
        rounds: int = 10,
        opt_state: optax.OptState | None = None,
    ) -> Compact[Tree]:
        """Returns the model with the fastest format of each parameter, see `measure`.

        Of formats that are equally fast, the one with fewer bytes wins.

        Args:
          params: parameters like `self.params`.
          *args: inputs of the model.
          rounds: number of measurements of each product.
          opt_state: the optimizer's state of `params`; `None`: `self.opt_state`; `()`: no state.

        Returns:
          A compact model with `params` and `opt_state` in the new formats.

        Raises:
          ValueError: `opt_state` is missing, and `self.opt_state` belongs to other parameters.
        """
        dense, state = self.dense(params), opt_state
        if state is None and self.opt_state is not None:
            if params is not self.params:
                raise ValueError("opt_state is None, and params are not model.params: give both.")
            state = self.opt_state
        map_moments(lambda _, leaf: leaf, self.stored_tree, state)
        models = self._in_all_formats(dense)
        nbytes = {
            (path, name): sum(stored)
            for name, model in models.items()
            for path, stored in count_bytes(model).items()
        }
        chosen = choose(measure(models, args, rounds), nbytes)
        state = None if state is None else self.dense_state(state)
        outside = self._outside
        tuned = compact(self.graph, dense, self.masks, state, outside=outside, formats=chosen)
        return dataclasses.replace(tuned, start={**tuned.start, "tx": self.start.get("tx")})

    def report(self, seconds: Mapping[Path, Mapping[str, float]] | None = None) -> str:
        """Returns a table of the parameters: format, kept values, and bytes.

        Lines below name operations that make a parameter dense outside of products.

        Args:
          seconds: times from `measure`, shown as columns.

        Returns:
          Text of several lines.
        """
        return show_rows(make_rows(self), seconds)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the bytes of all parameters: dense in light, compact with frozen entries in dark.

        Args:
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        return plot(make_rows(self), ax)

    def _check_movable(self, params: Params, opt_state: optax.OptState) -> None:
        """Raises a ValueError unless parameters and their optimizer's state can move."""
        if self._outside == "frozen":
            raise ValueError(
                "A compact model with outside = 'frozen' has values outside its masks, which "
                "cannot move. Give compact outside='zero'."
            )
        wrap_values(self, params)
        map_moments(lambda _, leaf: leaf, self.stored_tree, opt_state)

    @property
    def stored_tree(self) -> StoredTree:
        """Tree like the parameters of `StoredParameter`, `None` for dense parameters."""
        layouts = dict(self.layouts)

        def describe(path: trees.KeyPath, positions: jax.Array) -> StoredParameter:
            name, layout = trees.path_string(path), layouts[trees.path_names(path)]
            return StoredParameter(name, layout, positions)

        return trees.map_matched(describe, self.indices)

    @property
    def _outside(self) -> Outside:
        """The argument of `compact`, which layouts store."""
        is_frozen = any(layout.is_frozen for _, layout in self.layouts)
        return "frozen" if is_frozen else "zero"

    def _in_all_formats(self, dense: Tree) -> dict[str, Compact[Tree]]:
        """Returns the model in each format, where parameters can have the format."""
        masks, outside = self.masks, self._outside
        arrays = read_masks_by_path(self.graph, masks)
        masked = describe_masked(self.graph, arrays, outside == "frozen").items()
        models = {}
        for name, layout in FORMAT_LAYOUTS.items():
            formats = {path: name if layout.make(x) else ANY_MASK for path, x in masked}
            models[name] = compact(self.graph, dense, masks, outside=outside, formats=formats)
        return models


def _check_move(pruner: object, count: chex.Numeric, loss: object, tx: object) -> None:
    """Raises a ValueError that names an argument of `Compact.move` of another type."""
    check_kind("pruner", pruner, BaseUpdater, "an updater such as RigL()")
    check_function("loss", loss, "(apply, params)", optional=True)
    if tx is not None:
        check_optimizer("tx", tx)
    dtype = getattr(count, "dtype", type(count))
    is_integer = not getattr(count, "shape", ()) and np.issubdtype(dtype, np.integer)
    if not is_integer or (not is_traced(count) and count < 0):
        raise ValueError(f"count must be a number of steps, got count = {count!r}.")


# `register_dataclass` of jax 0.8 fails for a field such as `start`, which is no part of the pytree.
jax.tree_util.register_pytree_with_keys(
    Compact,
    lambda model: (
        [(jax.tree_util.GetAttrKey(name), getattr(model, name)) for name in ("indices", "frozen")],
        (model.graph, model.layouts, model.densifies_one_at_a_time),
    ),
    lambda static, leaves: Compact(*[*leaves, *static]),
)


def compact(
    graph: Graph,
    params: Tree,
    masks: Masks,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
    outside: Outside = "zero",
    formats: Mapping[Path, str] | Mapping[str, str] | None = None,
) -> Compact[Tree]:
    """Stores masked parameters as their kept values, for training in the memory of these values.

    Call `model.apply` in the loss, and train `model.params` entry by entry, without a wrapper.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced.
      masks: masks of any pattern, not packed; `None` for dense parameters.
      opt_state: state of an optimizer of `params`, or a SparseState around that state.
      tx: the optimizer of `opt_state`; `model.tx` trains on, of a wrapped one the inner. Its
        program must prove that kept values train as masked parameters; without `tx` you vouch.
      outside: 'zero': entries outside the masks are 0. 'frozen': these entries stay as they are.
      formats: {path: format} of some parameters, each path a tuple of strings or joined by '/'; see
        `Compact`. Others are 'grouped' where 4 or more neighbouring outputs keep the same inputs
        and all products allow it, else 'values'.

    Raises:
      ValueError: masks are traced or not of `params`, as the state; no proof is found for `tx`; a
        format or a path is unknown; a parameter is not floating; or a
        mesh divides an axis that indexes no slices. Errors name the parameter.

    Example:
      >>> import jax, jax.numpy as jnp, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])}
      >>> masks = {"w": jnp.array([[1, 0, 1], [0, 1, 0]], jnp.uint8)}
      >>> x = jnp.ones((1, 2))
      >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, x)
      >>> model = sparsity.compact(graph, params, masks)
      >>> model.params["w"], model.apply(model.params, x)
      (Array([1., 2., 3.], dtype=float32), Array([[1., 3., 2.]], dtype=float32))
      >>> jax.grad(lambda params: model.apply(params, x).sum())(model.params)["w"]
      Array([1., 1., 1.], dtype=float32)
    """
    check_kind("graph", graph, Graph, "made by sparsity.trace")
    check_masks_and_state(masks, opt_state, tx, may_hold_masks=False)
    if not isinstance(outside, str) or outside not in ("zero", "frozen"):
        raise ValueError(f"outside must be 'zero' or 'frozen', got outside = {outside!r}.")
    check_params(graph, params)
    check_values("opt_state", opt_state, "Call compact outside of jit, scan and vmap.")
    is_frozen = outside == "frozen"
    by_path = read_masks_by_path(graph, masks)
    masked = describe_masked(graph, by_path, is_frozen)
    stored, stored_tree = build(graph, params, masked, read_formats(formats or {}, masked))
    opt_state = densify_kept_states(opt_state, params)
    kept_state = gather_state(stored_tree, opt_state)
    if tx is not None:
        check_entries(tx, params, stored.start["params"], opt_state, kept_state, by_path)
        tx = unwrap(tx)
    return _start_with(stored, {**stored.start, "opt_state": kept_state, "tx": tx})


def _start_with(stored: StoredModel, start: Mapping[str, PyTree]) -> Compact[PyTree]:
    return Compact(
        indices=stored.indices,
        frozen=stored.frozen,
        graph=stored.graph,
        layouts=stored.layouts,
        densifies_one_at_a_time=stored.densifies_one_at_a_time,
        start=start,
    )
