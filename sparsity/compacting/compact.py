"""`sparsity.compact`: a model in the memory of the values that its masks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.compacting import table
from sparsity.compacting.densifier import Densifier, Record
from sparsity.compacting.formats import (
    Dense,
    FormatLayout,
    KeptArray,
    MaskedParameter,
    Values,
    is_kept,
)
from sparsity.compacting.grouped import Grouped
from sparsity.compacting.moving import Loss, check_arguments, move_masks
from sparsity.compacting.state import (
    StoredParameter,
    StoredTree,
    densify_kept_states,
    gather_state,
    map_moments,
    read_optimizer,
)
from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind, check_values
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.graph import Graph
from sparsity.masks.slice_layout import SliceLayout, check_entries
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.checks import check_masks_and_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Outside: TypeAlias = Literal["zero", "frozen"]

FORMAT_LAYOUTS: dict[str, type[FormatLayout]] = {x.format: x for x in (Values, Grouped, Dense)}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compact(Generic[Tree]):
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

    indices: PyTree
    frozen: PyTree
    graph: Graph
    layouts: tuple[tuple[Path, FormatLayout], ...]
    densifies_one_at_a_time: bool
    start: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)

    @property
    def params(self) -> Tree:
        """The parameters to start from: kept values of masked parameters, and dense parameters.

        A compiled step that donates its arguments deletes these arrays.
        """
        return self._read_start("params")

    @property
    def opt_state(self) -> PyTree:
        """The optimizer's state of `params`, `None` without `opt_state`."""
        return self._read_start("opt_state")

    @property
    def tx(self) -> optax.GradientTransformation | None:
        """The optimizer of `opt_state`, which has no wrapper; `None` without `tx`."""
        return self._read_start("tx")

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
        return self._run(params, args)

    def _run(
        self, params: Params, args: tuple[PyTree, ...], record: Record = lambda *_: None
    ) -> PyTree:
        """Runs the model as `apply` does; `record` is that of `Densifier`."""
        arrays, rebuild = trees.split_arrays(params)
        leaves = jax.tree.leaves(self._wrap(params), is_leaf=is_kept)
        leaves = [leaf for leaf in leaves if is_kept(leaf) or trees.is_array(leaf)]

        def describe(struct: jax.ShapeDtypeStruct, leaf: jax.Array | KeptArray) -> PyTree:
            if not is_kept(leaf):
                return struct
            dense = sharding.resize_struct(struct, leaf.shape)
            return dense.update(sharding=leaf.explicit_sharding or dense.sharding)

        example = rebuild([*map(describe, sharding.abstract(arrays), leaves)])
        graph = self.graph.retrace(example, *args)
        densifier = Densifier(graph.tracker.is_data, self.densifies_one_at_a_time, record)
        return graph.model.run(densifier, [*leaves, *trees.split_arrays(args)[0]])

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
        check_arguments(self, pruner, count, loss, tx)
        self._wrap(params)
        map_moments(lambda _, leaf: leaf, self.stored_tree, opt_state)
        positions, params, opt_state = move_masks(self, pruner, params, opt_state, count, loss, tx)
        start = {**self.start, "params": params, "opt_state": opt_state}
        return dataclasses.replace(self, indices=positions, start=start), params, opt_state

    def dense(self, params: Params) -> Tree:
        """Returns the dense parameters; outside the masks they are 0, or frozen."""
        return jax.tree.map(
            lambda leaf: leaf.densify() if is_kept(leaf) else leaf,
            self._wrap(params),
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
        return jax.tree.map(lambda x: x.layout.make_mask(x.positions), self.stored_tree)

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
        return table.measure(self._in_all_formats(self.dense(params)), args, rounds)

    def tune(
        self,
        params: Params,
        *args: PyTree,
        rounds: int = 10,
        opt_state: optax.OptState | None = None,
    ) -> Compact[Tree]:
        """Returns the model with the fastest format of each parameter, see `measure`.

        Of formats that are equally fast, 'values' wins, then 'grouped'.

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
        state = None if state is None else self.dense_state(state)
        formats = table.choose(table.measure(self._in_all_formats(dense), args, rounds))
        tuned = compact(
            self.graph, dense, self.masks, state, outside=self._outside, formats=formats
        )
        return dataclasses.replace(tuned, start={**tuned.start, "tx": self.start.get("tx")})

    def report(self, seconds: table.Seconds | None = None) -> str:
        """Returns a table of the parameters: format, kept values, and bytes.

        Lines below name operations that make a parameter dense outside of products.

        Args:
          seconds: times from `measure`, shown as columns.

        Returns:
          Text of several lines.
        """
        return table.make_report(self, seconds)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the bytes of all parameters: dense in light, compact with frozen entries in dark.

        Args:
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        return table.plot(self, ax)

    @property
    def stored_tree(self) -> StoredTree:
        """Tree like the parameters of `StoredParameter`, `None` for dense parameters."""
        layouts = dict(self.layouts)
        return trees.map_matched(
            lambda path, positions: StoredParameter(
                trees.path_string(path), layouts[trees.path_names(path)], positions
            ),
            self.indices,
        )

    def _read_start(self, name: str) -> PyTree:
        """Returns an entry of `start`; raises an AttributeError if jax made the model."""
        if name in self.start:
            return self.start[name]
        raise AttributeError(
            f"This Compact has no {name}: jax made it from its leaves, in a function such as "
            "jit, grad or jax.tree.map, and they are positions and frozen entries only. Keep "
            "parameters and the optimizer's state beside the model, as arguments and results."
        )

    def _wrap(self, params: Params) -> PyTree:
        """Returns the parameters with `KeptArray` for masked ones.

        Raises:
          ValueError: a parameter is missing, or has another shape than its kept values; or a dense
            parameter has another shape than in the graph.
        """
        shapes = {parameter.path: parameter.shape for parameter in self.graph.parameters}

        def wrap(
            path: trees.KeyPath, leaf: PyTree, stored: StoredParameter | None, frozen: PyTree
        ) -> PyTree:
            shape = stored.layout.kept_shape if stored else shapes.get(trees.path_names(path))
            if shape is not None and jnp.shape(leaf) != shape:
                name = trees.path_string(path)
                what = f"kept values of {name!r} have" if stored else f"parameter {name!r} has"
                raise ValueError(
                    f"The {what} the shape {shape}, got {jnp.shape(leaf)}. Give parameters like "
                    "model.params."
                )
            if stored is None:
                return leaf
            return stored.layout.wrap(leaf, stored.positions, frozen, stored.name)

        role = "positions of kept values"
        return trees.map_matched(wrap, params, self.stored_tree, self.frozen, others_role=role)

    @property
    def _outside(self) -> Outside:
        """The argument of `compact`, which layouts store."""
        return "frozen" if any(layout.is_frozen for _, layout in self.layouts) else "zero"

    def _in_all_formats(self, dense: Tree) -> dict[str, Compact[Tree]]:
        """Returns the model in each format, where parameters can have the format."""
        masks, outside = self.masks, self._outside
        masked = _describe_masked(self.graph, dense, masks, outside == "frozen").items()
        models = {}
        for name, layout in FORMAT_LAYOUTS.items():
            formats = {path: name if layout.make(x) else "values" for path, x in masked}
            models[name] = compact(self.graph, dense, masks, outside=outside, formats=formats)
        return models


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
        format or a path is unknown; a masked parameter is not floating; or a mesh divides an axis
        that indexes no slices. Errors name the parameter.

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
    check_values("opt_state", opt_state, "Call compact outside of jit, scan and vmap.")
    _check_params(graph, params)
    masked = _describe_masked(graph, params, masks, outside == "frozen")
    model = _build(graph, params, masked, _read_formats(formats, masked))
    opt_state = densify_kept_states(opt_state, params)
    kept_state = gather_state(model.stored_tree, opt_state)
    if tx is not None:
        by_path = {path: parameter.mask for path, parameter in masked.items()}
        tx = read_optimizer(tx, params, model.params, opt_state, kept_state, by_path)
    start = {**model.start, "opt_state": kept_state, "tx": tx}
    return dataclasses.replace(model, start=start)


def _check_params(graph: Graph, params: Params) -> None:
    """Raises a ValueError unless the leaves are arrays with the paths and shapes of the graph."""
    graph.parameters.check_complete(params)
    for key_path, parameter in graph.parameters.match(params, may_be_smaller=False).items():
        if trees.path_names(key_path) != parameter.path:
            raise ValueError(
                f"The params have an array {trees.path_string(key_path)!r} of shape "
                f"{parameter.shape}, {parameter.name!r} in the graph. Give the complete tree."
            )


def _describe_masked(
    graph: Graph, params: Params, masks: Masks, is_frozen: bool
) -> dict[Path, MaskedParameter]:
    """Returns the masked parameters by path.

    Slices are layers of scans. Axes that index separate products, as experts do, follow if all
    slices keep equally many entries.

    Raises:
      ValueError: a mask belongs to no parameter, has another shape or other entries than 0 and 1,
        or its parameter is not floating.
    """
    scanned, leaves = graph.tracker.find_scanned_axes(), trees.leaves_by_names(params)
    masked = {}
    for parameter, array in graph.parameters.match_masks(masks):
        path, mask = parameter.path, np.asarray(array)
        if not trees.is_prunable(leaves[path]):
            raise ValueError(
                f"The masks have a leaf at {parameter.name!r}, whose dtype {leaves[path].dtype} is "
                "not floating. Give it no mask: None."
            )
        check_entries(mask, parameter.name)
        products = list(graph.tracker.find_products(path))
        batch = set.intersection(*({*x.batch} for x in products)) if products else set()
        stack = scanned.get(path, ())
        slices = (*stack, *sorted(batch - {*stack}))
        if len({*SliceLayout(mask.shape, slices).count_kept(mask).ravel().tolist()}) == 1:
            stack = slices
        # The axes over which all products sum, if they sum over the same ones, without groups.
        inputs = products[0].contracting if products else ()
        is_alike = all((x.contracting, x.groups) == (inputs, 1) for x in products)
        has_outputs = len(inputs) + len(stack) < mask.ndim and not {*inputs} & {*stack}
        inputs = inputs if is_alike and has_outputs else ()
        masked[path] = MaskedParameter(mask, stack, inputs, is_frozen)
    return masked


def _read_formats(
    formats: Mapping[Path, str] | Mapping[str, str] | None, masked: Mapping[Path, MaskedParameter]
) -> dict[Path, str]:
    """Returns formats by path; raises a ValueError for unknown paths and formats."""
    check_kind("formats", formats, Mapping | None, "a dict {path: format}")
    chosen = {}
    for key, name in (formats or {}).items():
        path = tuple(filter(None, key.split("/"))) if isinstance(key, str) else key
        if path not in masked:
            raise ValueError(
                f"formats has the path {key!r}, which has no mask. Masked are "
                f"{trees.listed([trees.join_names(path) for path in masked])}."
            )
        if name not in (*FORMAT_LAYOUTS,):
            raise ValueError(f"formats[{key!r}] must be one of {(*FORMAT_LAYOUTS,)}, got {name!r}.")
        chosen[path] = name
    return chosen


def _build(
    graph: Graph,
    params: Tree,
    masked: Mapping[Path, MaskedParameter],
    formats: Mapping[Path, str],
) -> Compact[Tree]:
    """Returns the model of kept values, without a state.

    Raises:
      ValueError: a parameter cannot have the chosen format, or a mesh divides its values.
    """
    made = {path: _make_layout(path, x, formats.get(path)) for path, x in masked.items()}
    layouts = {path: layout for path, (layout, _) in made.items()}

    def place(path: trees.KeyPath, leaf: PyTree) -> jax.Array | None:
        if (names := trees.path_names(path)) not in made:
            return None
        layout, positions = made[names]
        return layout.place(positions, leaf, trees.path_string(path))

    def freeze(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        layout = layouts.get(trees.path_names(path))
        if layout is None or not layout.is_frozen:
            return None
        return leaf if layout.order == tuple(range(leaf.ndim)) else leaf.transpose(layout.order)

    def gather(_: trees.KeyPath, leaf: PyTree, stored: StoredParameter | None) -> PyTree:
        return leaf if stored is None else stored.gather(leaf)

    indices, frozen = (trees.map_matched(fn, params) for fn in (place, freeze))
    is_alone = jax.device_count() == 1
    model: Compact[Tree] = Compact(indices, frozen, graph, tuple(layouts.items()), is_alone)
    # A product may read a dense array, although the automatic format needs none.
    automatic = [path for path, each in layouts.items() if each.multiplies and path not in formats]
    readers = table.find_readers(model) if automatic else {}
    if refused := [path for path in automatic if trees.join_names(path) in readers]:
        return _build(graph, params, masked, {**formats, **dict.fromkeys(refused, "values")})
    values = trees.map_matched(gather, params, model.stored_tree)
    return dataclasses.replace(model, start={"params": values})


def _make_layout(
    path: Path, parameter: MaskedParameter, name: str | None
) -> tuple[FormatLayout, np.ndarray]:
    """Returns the layout of a parameter in a format, by default the best one, and positions."""
    made: tuple[FormatLayout, np.ndarray] | None
    if name is None:
        made = Grouped.make_groups(parameter) or Values.make(parameter)
    else:
        made = FORMAT_LAYOUTS[name].make(parameter)
    if made is None:
        raise ValueError(
            f"formats has {name!r} for {trees.join_names(path)!r} of shape "
            f"{parameter.mask.shape}, but {FORMAT_LAYOUTS[str(name)].refusal}"
        )
    layout, positions = made
    return dataclasses.replace(layout, is_frozen=parameter.is_frozen), positions
