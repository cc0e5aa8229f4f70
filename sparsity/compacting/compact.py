"""`sparsity.compact`: a model in the memory of the values that its masks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sparsity.compacting.evaluate import Reader
from sparsity.compacting.kept import Kept, Lazy, kept_in
from sparsity.compacting.layouts import Format, Layout, Path, make_layouts, read_formats, read_masks
from sparsity.compacting.report import Row, plot, table
from sparsity.compacting.state import Owner, check_optimizer, densify_state, take_state
from sparsity.core import sharding, trees
from sparsity.core.trees import PyTree
from sparsity.graph import Graph
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation
from sparsity.training import comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compact:
    """A model whose masked parameters are their kept values. Made by `compact`.

    A pytree whose leaves are the positions of the values, and frozen entries: give the object to
    compiled functions as an argument, and store it with the values. `params` and `opt_state` are no
    leaves: a compiled function gets them as arguments of their own.

    Attributes:
      indices: tree like the parameters: positions of the kept values, `None` for dense parameters.
      base: tree like the parameters: entries outside the masks, `None` for zeros.
      graph: the graph of the model.
      layouts: (path, layout) of each masked parameter.
      in_turn: whether each dense parameter waits for the inputs of its product, which limits memory
        on one device.
      params: the parameters to start from: kept values of masked parameters, and dense ones.
      opt_state: the optimizer's state to start from, `None` without `opt_state`.
      update_error: the largest difference between updates of kept values and of masked parameters,
        as a part of the largest entry of an array; `None` without `tx`.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0], [0.0, 2.0]])}
      >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, jnp.ones((1, 2)))
      >>> model = sparsity.compact(graph, params, {"w": jnp.eye(2, dtype=jnp.uint8)})
      >>> model.indices, model.params
      ({'w': Array([0, 3], dtype=int32)}, {'w': Array([1., 2.], dtype=float32)})
    """

    indices: PyTree
    base: PyTree
    graph: Graph
    layouts: tuple[tuple[Path, Layout], ...]
    in_turn: bool
    params: PyTree = None
    opt_state: PyTree | None = None
    update_error: float | None = None

    def __repr__(self) -> str:
        return f"Compact({', '.join(f'{x}: {f!r}' for x, f in self.formats.items()) or 'dense'})"

    def apply(self, params: PyTree, *args: PyTree) -> PyTree:
        """Runs the model: returns `fn(params, *args)` of the masked model.

        Can be compiled, differentiated in reverse, mapped and exported like `fn`, at any batch
        size. A masked parameter is dense only while an equation reads the parameter.

        Args:
          params: parameters like `self.params`, in any dtype.
          *args: inputs of the model.

        Raises:
          ValueError: parameters are missing or have another shape; the error names the parameter.
        """
        graph, inputs = self._retrace(params, args)
        outputs = Reader(graph.is_data, self.in_turn).run(graph.program, inputs)
        return jax.tree.unflatten(graph.output_tree, outputs)

    def dense(self, params: PyTree) -> PyTree:
        """Returns the dense parameters; outside the masks they are 0, or frozen."""
        return jax.tree.map(
            lambda leaf: leaf.densify() if isinstance(leaf, Kept) else leaf,
            self._wrap(params),
            is_leaf=lambda leaf: isinstance(leaf, Kept),
        )

    def dense_state(self, opt_state: PyTree) -> PyTree:
        """Returns the optimizer's state of the dense parameters, with moments 0 outside the masks.

        Args:
          opt_state: state of an optimizer of parameters like `self.params`.
        """
        return densify_state(self._owners(), opt_state)

    @property
    def masks(self) -> PyTree:
        """Masks like the parameters, uint8, 1 = keep, `None` for dense parameters."""

        def mask(path: trees.KeyPath, indices: jax.Array) -> jax.Array:
            layout = self._layouts[trees.path_names(path)]
            return layout.wrap(jnp.ones(layout.kept_shape, jnp.uint8), indices).densify()

        return trees.map_matched(mask, self.indices)

    @property
    def formats(self) -> dict[Path, Format]:
        """{path: format} of the masked parameters."""
        return {path: layout.format for path, layout in self.layouts}

    def report(self) -> str:
        """Returns a table of the parameters: format, kept values, and bytes.

        The last column names operations that read a parameter as a dense array outside of products.

        Returns:
          Text of several lines.
        """
        return table(self._rows())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the bytes of all parameters: dense in light, compact in dark.

        Args:
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        return plot(self._rows(), ax)

    @property
    def _layouts(self) -> dict[Path, Layout]:
        return dict(self.layouts)

    def _owners(self) -> PyTree:
        layouts = self._layouts

        def make(path: trees.KeyPath, leaf: PyTree, indices: jax.Array | None) -> Owner:
            return Owner(trees.path_string(path), layouts.get(trees.path_names(path)), indices)

        return trees.map_matched(make, self.params, self.indices)

    def _retrace(self, params: PyTree, args: tuple[PyTree, ...]) -> tuple[Graph, list[Lazy]]:
        """Returns the graph of the model for these arguments, and the inputs of its program."""
        arrays, rebuild = trees.split_arrays(params)
        kept = jax.tree.leaves(self._wrap(params), is_leaf=lambda x: isinstance(x, Kept))
        kept = [leaf for leaf in kept if isinstance(leaf, Kept) or trees.is_array(leaf)]
        structs = zip(sharding.abstract(arrays), kept, strict=True)
        example = rebuild([sharding.resized(struct, leaf.shape) for struct, leaf in structs])
        return self.graph.retrace(example, *args), [*kept, *trees.split_arrays(args)[0]]

    def _wrap(self, params: PyTree) -> PyTree:
        """Returns the parameters with `Kept` for masked ones.

        Raises:
          ValueError: a parameter is missing, or has another shape than its kept values.
        """
        layouts = self._layouts

        def wrap(
            path: trees.KeyPath, leaf: PyTree, indices: jax.Array | None, base: jax.Array | None
        ) -> PyTree:
            if indices is None:
                return leaf
            layout = layouts[trees.path_names(path)]
            name = trees.path_string(path)
            if jnp.shape(leaf) != layout.kept_shape:
                raise ValueError(
                    f"The kept values of {name!r} have the shape {layout.kept_shape}, got "
                    f"{jnp.shape(leaf)}. Give parameters like compact.params."
                )
            return layout.wrap(leaf, indices, base, name)

        return trees.map_matched(
            wrap, params, self.indices, self.base, others_role="positions of kept values"
        )

    def _rows(self) -> list[Row]:
        """Returns the rows of tables and pictures, in tree order."""
        readers = self._find_readers()
        indices = trees.leaves_by_path(self.indices)
        by_names = {trees.path_names(path): index for path, index in indices.items()}
        rows = []
        for leaf in self.graph.leaves:
            layout = self._layouts.get(leaf.path)
            nbytes = leaf.size * leaf.dtype.itemsize
            if layout is None:
                stored = nbytes, 0
                rows.append(Row(leaf.name, leaf.shape, "", leaf.size, 0, nbytes, stored))
                continue
            index = by_names[leaf.path]
            count = int(np.prod(layout.kept_shape)) - layout.padding
            stored = (count + layout.padding) * leaf.dtype.itemsize, index.nbytes
            where = sorted(readers.get(leaf.name, ()))
            rows.append(
                Row(
                    leaf.name,
                    leaf.shape,
                    layout.format,
                    count,
                    layout.padding,
                    nbytes,
                    stored,
                    tuple(where),
                )
            )
        return rows

    def _find_readers(self) -> dict[str, set[str]]:
        """Returns {name: operations other than products that read the parameter as dense}."""
        readers: dict[str, set[str]] = {}

        def record(equation: Equation, inputs: Sequence[Lazy]) -> None:
            for kept in () if equation.name in PRODUCTS else kept_in(inputs):
                where = f"{equation.name} {equation.source}".strip()
                readers.setdefault(kept.name, set()).add(where)

        params, args = self.graph.example

        def run(params: PyTree, args: PyTree) -> list[jax.Array]:
            graph, inputs = self._retrace(params, args)
            return Reader(graph.is_data, False, record).run(graph.program, inputs)

        def struct(path: trees.KeyPath, leaf: PyTree) -> PyTree:
            layout = self._layouts.get(trees.path_names(path))
            return leaf if layout is None else sharding.resized(leaf, layout.kept_shape)

        arrays, rebuild = trees.split_arrays((trees.map_matched(struct, params), args))
        jax.eval_shape(lambda arrays: run(*rebuild(arrays)), arrays)
        return readers


jax.tree_util.register_dataclass(
    Compact,
    ["indices", "base"],
    ["graph", "layouts", "in_turn"],
    ["params", "opt_state", "update_error"],
)


def compact(
    graph: Graph,
    params: PyTree,
    masks: PyTree,
    opt_state: PyTree | None = None,
    tx: optax.GradientTransformation | None = None,
    outside: Literal["zero", "frozen"] = "zero",
    formats: Mapping[Path | str, Format] | None = None,
) -> Compact:
    """Stores masked parameters as their kept values, for training in the memory of these values.

    A mask keeps k entries, so that k values stand for a parameter: in the model, in the gradient
    and in the optimizer's state. Any optimizer that works entry by entry trains the values:
    `tx.init(compact.params)`, and `compact.apply` in the loss. The optimizer needs no wrapper.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced.
      masks: masks of any pattern, not packed; `None` for dense parameters.
      opt_state: state of an optimizer of `params`, to continue a run: moments of kept entries and
        counts stay. Of a SparseState the inner state is taken.
      tx: the optimizer of that state, of a SparseState the inner one, to check that kept values
        train as the masked model does: at least four updates by random gradients are compared.
      outside: 'zero': entries outside the masks are 0. 'frozen': these entries stay as they are in
        `params`, and are not trained.
      formats: {path: format} of masked parameters, each path a tuple of strings or joined by '/'.
        'values' stores k values a slice; the parameter is dense while a product reads the
        parameter. 'dense' stores the parameter itself. Slices are layers of scans, and matrices of
        separate products, such as experts, if all keep equally many entries. Layers of scans that
        keep different numbers are padded.

    Returns:
      The compact model.

    Raises:
      ValueError: masks or the optimizer's state belong to other parameters, a parameter with a mask
        is not floating, `tx` would train kept values otherwise, a format or a path is unknown, or a
        mesh divides an axis of a masked parameter that indexes no slices. The error names the
        parameter.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])}
      >>> masks = {"w": jnp.array([[1, 0, 1], [0, 1, 0]], jnp.uint8)}
      >>> x = jnp.ones((1, 2))
      >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, x)
      >>> model = sparsity.compact(graph, params, masks)
      >>> model.params["w"], model.apply(model.params, x)
      (Array([1., 2., 3.], dtype=float32), Array([[1., 3., 2.]], dtype=float32))
      >>> grads = jax.grad(lambda params: model.apply(params, x).sum())(model.params)
      >>> updates, _ = optax.sgd(0.5).update(grads, optax.sgd(0.5).init(model.params))
      >>> model.dense(optax.apply_updates(model.params, updates))["w"]
      Array([[0.5, 0. , 1.5],
             [0. , 2.5, 0. ]], dtype=float32)
    """
    comparison.check_arguments(masks, opt_state, tx)
    if outside not in ("zero", "frozen"):
        raise ValueError(f"outside must be 'zero' or 'frozen', got outside = {outside!r}.")
    graph.match_parameters(params)
    arrays = read_masks(graph, params, masks)
    layouts, indices = make_layouts(graph, arrays, read_formats(formats or {}, arrays))

    def owner(path: trees.KeyPath, leaf: PyTree) -> Owner:
        names = trees.path_names(path)
        return Owner(trees.path_string(path), layouts.get(names), indices.get(names))

    def place(path: trees.KeyPath, leaf: PyTree) -> jax.Array | None:
        layout = layouts.get(trees.path_names(path))
        return None if layout is None else _place(indices[trees.path_names(path)], layout, leaf)

    def freeze(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        layout = layouts.get(trees.path_names(path))
        if layout is None or outside == "zero":
            return None
        is_first = layout.order == tuple(range(len(layout.order)))
        return leaf if is_first else leaf.transpose(layout.order)

    def take(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        layout = layouts.get(trees.path_names(path))
        if layout is None:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return sharding.resized(leaf, layout.kept_shape)
        values = layout.take(np.asarray(leaf), indices[trees.path_names(path)])
        return _place(values, layout, leaf)

    for key, leaf in trees.leaves_by_path(params).items():
        if trees.path_names(key) in layouts:
            _check_sharding(trees.path_string(key), layouts[trees.path_names(key)], leaf)
    owner_tree = trees.map_matched(owner, params)
    return Compact(
        trees.map_matched(place, params),
        trees.map_matched(freeze, params),
        graph,
        tuple(layouts.items()),
        all(_num_devices(leaf) == 1 for leaf in jax.tree.leaves(params)),
        trees.map_matched(take, params),
        None if opt_state is None else take_state(owner_tree, opt_state),
        None
        if tx is None or opt_state is None
        else check_optimizer(tx, params, owner_tree, opt_state),
    )


def _num_devices(leaf: PyTree) -> int:
    return len(leaf.sharding.device_set) if getattr(leaf, "sharding", None) is not None else 1


def _check_sharding(name: str, layout: Layout, leaf: PyTree) -> None:
    """Raises a ValueError if a mesh divides an axis that indexes no slices."""
    placed = getattr(leaf, "sharding", None)
    if not isinstance(placed, NamedSharding):
        return
    counts = sharding.num_devices(placed, len(layout.shape))
    divided = [axis for axis in layout.order[len(layout.stack) :] if counts[axis] > 1]
    if divided and layout.format != "dense":
        raise ValueError(
            f"{name!r} of shape {layout.shape} is sharded along axis {divided[0]} "
            f"({placed.spec}), and the parts of its devices keep different numbers of entries. "
            "Shard it along the axes that index slices, or replicate it first: "
            "jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))."
        )


def _place(array: np.ndarray, layout: Layout, like: PyTree) -> jax.Array:
    """Returns an array on the devices of a parameter, sharded along the stack."""
    placed = getattr(like, "sharding", None)
    if not isinstance(placed, NamedSharding):
        return jnp.asarray(array)
    entries = [*placed.spec, *[None] * len(layout.shape)]
    axes = layout.order if layout.format == "dense" else layout.stack
    spec = PartitionSpec(*(entries[axis] for axis in axes))
    result: jax.Array = jax.device_put(array, placed.update(spec=spec))
    return result
