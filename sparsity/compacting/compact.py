"""`sparsity.compact`: a model in the memory of the values that its masks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.compacting.evaluate import Reader
from sparsity.compacting.kept import Kept
from sparsity.compacting.layouts import (
    Format,
    Layout,
    Path,
    count_stack_axes,
    dense_layout,
    flat_layout,
)
from sparsity.core import sharding, trees
from sparsity.core.trees import PyTree
from sparsity.graph import Graph


@dataclasses.dataclass(frozen=True, eq=False)
class Compact:
    """A model whose masked parameters are their kept values. Made by `compact`.

    A pytree whose leaves are the positions of the values: give it to compiled functions as an
    argument, and store it with the values. `params` and `opt_state` are no leaves; a compiled
    function gets them as arguments of their own.

    Attributes:
      indices: tree like the parameters: positions of the kept values, `None` for dense parameters.
      base: tree like the parameters: entries outside the masks, `None` for zeros.
      graph: the graph of the model.
      layouts: (path, layout) of each masked parameter.
      in_turn: whether each dense parameter waits for the inputs of its product.
      params: the parameters to start from: kept values of masked parameters, and dense ones.
      opt_state: the optimizer's state to start from, `None` without `opt_state`.
    """

    indices: PyTree
    base: PyTree
    graph: Graph
    layouts: tuple[tuple[Path, Layout], ...]
    in_turn: bool
    params: PyTree = None
    opt_state: optax.OptState | None = None

    def apply(self, params: PyTree, *args: PyTree) -> PyTree:
        """Runs the model: returns `fn(params, *args)` of the masked model.

        Can be compiled, differentiated in reverse, mapped and exported like `fn`, at any batch
        size. A dense parameter exists only while an equation reads the parameter.

        Args:
          params: parameters like those of `params`, in any dtype.
          *args: inputs of the model.
        """
        arrays, rebuild = trees.split_arrays(params)
        kept = jax.tree.leaves(self._wrap(params), is_leaf=lambda x: isinstance(x, Kept))
        kept = [leaf for leaf in kept if isinstance(leaf, Kept) or trees.is_array(leaf)]
        structs = zip(sharding.abstract(arrays), kept, strict=True)
        example = rebuild([sharding.resized(struct, leaf.shape) for struct, leaf in structs])
        graph = self.graph.retrace(example, *args)
        inputs = trees.split_arrays(args)[0]
        outputs = Reader(graph.is_data, self.in_turn).run(graph.program, [*kept, *inputs])
        return jax.tree.unflatten(graph.output_tree, outputs)

    def dense(self, params: PyTree) -> PyTree:
        """Returns the dense parameters, with zeros (or the base) outside the masks."""
        return jax.tree.map(
            lambda leaf: leaf.densify() if isinstance(leaf, Kept) else leaf,
            self._wrap(params),
            is_leaf=lambda leaf: isinstance(leaf, Kept),
        )

    @property
    def masks(self) -> PyTree:
        """Masks like the parameters, uint8, 1 = keep, `None` for dense parameters."""
        layouts = dict(self.layouts)

        def mask(path: trees.KeyPath, indices: jax.Array) -> jax.Array:
            layout = layouts[trees.path_names(path)]
            ones = jnp.ones(layout.kept_shape, jnp.uint8)
            return layout.wrap(ones, indices).densify()

        return trees.map_matched(mask, self.indices)

    @property
    def formats(self) -> dict[Path, Format]:
        """Format of each masked parameter."""
        return {path: layout.format for path, layout in self.layouts}

    def _wrap(self, params: PyTree) -> PyTree:
        """Returns the parameters with `Kept` for masked ones.

        Raises:
          ValueError: a parameter is missing, or has another shape than its kept values.
        """
        layouts = dict(self.layouts)

        def wrap(
            path: trees.KeyPath, leaf: PyTree, indices: jax.Array | None, base: jax.Array | None
        ) -> PyTree:
            layout = layouts.pop(trees.path_names(path), None)
            if layout is None or indices is None:
                return leaf
            if jnp.shape(leaf) != layout.kept_shape:
                raise ValueError(
                    f"compact takes the kept values of {trees.path_string(path)!r}, shape "
                    f"{layout.kept_shape}, got shape {jnp.shape(leaf)}. Start from "
                    "compact.params, or compact the dense parameters."
                )
            return layout.wrap(leaf, indices, base)

        wrapped = trees.map_matched(wrap, params, self.indices, self.base)
        if layouts:
            names = trees.listed(["/".join(path) for path in layouts])
            raise ValueError(f"The params lack {names}. compact takes all parameters of the model.")
        return wrapped


jax.tree_util.register_dataclass(
    Compact,
    ["indices", "base"],
    ["graph", "layouts", "in_turn"],
    ["params", "opt_state"],
)


def compact(
    graph: Graph,
    params: PyTree,
    masks: PyTree,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
    outside: Literal["zero", "frozen"] = "zero",
    formats: Mapping[Path, Format] | None = None,
) -> Compact:
    """Stores masked parameters as their kept values, to be trained by any entrywise optimizer.
    """
    arrays = read_masks(graph, params, masks)
    stacks = count_stack_axes(graph, arrays)
    layouts, indices = {}, {}
    for path, mask in arrays.items():
        make = dense_layout if (formats or {}).get(path) == "dense" else flat_layout
        layouts[path], indices[path] = make(mask, stacks[path])

    def take(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        names = trees.path_names(path)
        if names not in layouts:
            return leaf
        return jnp.asarray(layouts[names].take(np.asarray(leaf), indices[names]))

    def place(path: trees.KeyPath, leaf: PyTree) -> jax.Array | None:
        names = trees.path_names(path)
        return jnp.asarray(indices[names]) if names in indices else None

    return Compact(
        trees.map_matched(place, params),
        trees.map_matched(lambda path, leaf: None, params),
        graph,
        tuple(layouts.items()),
        True,
        trees.map_matched(take, params),
        None,
    )


def read_masks(graph: Graph, params: PyTree, masks: PyTree) -> dict[Path, np.ndarray]:
    """Returns the masks by path, as the graph has them."""
    return {
        graph.find_parameter(trees.path_names(key), mask, "masks").path: np.asarray(mask)
        for key, mask in trees.leaves_by_path(masks).items()
    }
