"""Builds a model of kept values from a graph and masks: formats, positions and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.compacting.formats import ANY_MASK, AUTOMATIC, FORMAT_LAYOUTS
from sparsity.compacting.formats.base import FormatLayout, MaskedParameter
from sparsity.compacting.optimizer_state import StoredParameter, StoredTree
from sparsity.compacting.stored_model import StoredModel, find_readers
from sparsity.core import trees
from sparsity.core.checks import check_kind, is_traced
from sparsity.core.trees import Masks, Params, Path, PyTree
from sparsity.graph import Graph
from sparsity.masks.positions import check_entries
from sparsity.masks.slice_layout import SliceLayout


def build(
    graph: Graph,
    params: Params,
    masked: Mapping[Path, MaskedParameter],
    formats: Mapping[Path, str],
) -> tuple[StoredModel, StoredTree]:
    """Returns the model of kept values, and a tree of `StoredParameter`s like the parameters.

    Args:
      graph: the graph of the model.
      params: the parameters.
      masked: masked parameters by path, from `describe_masked`.
      formats: chosen formats by path.

    Raises:
      ValueError: a parameter cannot have the chosen format, or a mesh divides its values.
    """
    layouts, positions = _make_layouts(masked, formats)

    def describe(path: trees.KeyPath, leaf: PyTree) -> StoredParameter | None:
        names, name = trees.path_names(path), trees.path_string(path)
        if names not in layouts:
            return None
        layout = layouts[names]
        return StoredParameter(name, layout, layout.place(positions[names], leaf, name))

    def freeze(_: trees.KeyPath, leaf: PyTree, stored: StoredParameter | None) -> PyTree:
        if stored is None or not stored.layout.is_frozen:
            return None
        order = stored.layout.order
        return leaf if order == tuple(range(leaf.ndim)) else leaf.transpose(order)

    def gather(_: trees.KeyPath, leaf: PyTree, stored: StoredParameter | None) -> PyTree:
        return leaf if stored is None else stored.gather(leaf)

    stored_tree = trees.map_matched(describe, params)
    model = StoredModel(
        jax.tree.map(lambda stored: stored.positions, stored_tree),
        trees.map_matched(freeze, params, stored_tree),
        graph,
        tuple(layouts.items()),
        jax.device_count() == 1,
        {"params": trees.map_matched(gather, params, stored_tree)},
    )
    paths = [path for path, each in layouts.items() if each.multiplies and path not in formats]
    if paths:
        readers = find_readers(model)
        # A product may read a dense array, although the automatic format needs none.
        refused = [path for path in paths if trees.join_names(path) in readers]
        if refused:
            return build(graph, params, masked, {**formats, **dict.fromkeys(refused, ANY_MASK)})
    return model, stored_tree


def _make_layouts(
    masked: Mapping[Path, MaskedParameter], formats: Mapping[Path, str]
) -> tuple[dict[Path, FormatLayout], dict[Path, np.ndarray]]:
    """Returns the layouts of masked parameters, and the positions of their kept values.

    Raises:
      ValueError: a parameter cannot have the chosen format.
    """
    layouts, positions = {}, {}
    for path, parameter in masked.items():
        if path in formats:
            chosen = FORMAT_LAYOUTS[formats[path]]
            made = chosen.make(parameter)
            if made is None:
                raise ValueError(
                    f"formats has {chosen.format!r} for {trees.join_names(path)!r} of shape "
                    f"{parameter.mask.shape}, but {chosen.refusal}"
                )
        else:
            made = next(filter(None, (each.make_automatic(parameter) for each in AUTOMATIC)))
        layout, positions[path] = made
        layouts[path] = dataclasses.replace(layout, is_frozen=parameter.is_frozen)
    return layouts, positions


def describe_masked(
    graph: Graph, masks: Mapping[Path, np.ndarray], is_frozen: bool
) -> dict[Path, MaskedParameter]:
    """Returns the masked parameters by path.

    Slices are layers of scans. Axes that index separate products, as experts do, follow if all
    slices keep equally many entries.

    Args:
      graph: the graph of the model.
      masks: masks by path, from `read_masks_by_path`.
      is_frozen: whether entries outside the masks are stored.
    """
    scanned, masked = graph.tracker.find_scanned_axes(), dict[Path, MaskedParameter]()
    for path, mask in masks.items():
        batches = [{*use.batch} for use in graph.tracker.find_products(path)]
        batch = set.intersection(*batches) if batches else set()
        stack = scanned.get(path, ())
        slices = (*stack, *sorted(batch - {*stack}))
        counts = SliceLayout(mask.shape, slices).count_kept(mask)
        stack = slices if len({*counts.ravel().tolist()}) == 1 else stack
        inputs = _find_inputs(graph, path, stack)
        masked[path] = MaskedParameter(mask, stack, inputs, is_frozen)
    return masked


def _find_inputs(graph: Graph, path: Path, stack: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes of a parameter over which all its products sum, () if they differ."""
    roles = {(use.contracting, use.groups) for use in graph.tracker.find_products(path)}
    if len(roles) != 1:
        return ()
    ((inputs, groups),) = roles
    has_outputs = len(inputs) + len(stack) < len(graph.parameters.find_shape(path))
    return inputs if groups == 1 and has_outputs and not {*inputs} & {*stack} else ()


def check_params(graph: Graph, params: Params) -> None:
    """Raises a ValueError unless the leaves are arrays with the paths and shapes of the graph."""
    graph.parameters.check_complete(params)
    traced = {parameter.path: parameter for parameter in graph.parameters}
    for path, array in trees.leaves_by_names(params).items():
        if not hasattr(array, "shape"):
            continue
        name, parameter = trees.join_names(path), traced.get(path)
        if is_traced(array):
            raise ValueError(
                f"The parameter {name!r} is traced and has no values yet. Call compact outside of "
                "jit, scan and vmap."
            )
        if parameter is None or parameter.shape != array.shape:
            raise ValueError(
                f"The params have an array {name!r} of shape {array.shape}, with which the graph "
                "was not traced. Give the complete tree, or trace the model with these parameters."
            )
        if jnp.issubdtype(parameter.dtype, jnp.inexact) > jnp.issubdtype(array.dtype, jnp.inexact):
            raise ValueError(
                f"The parameter {name!r} is {array.dtype}, and the graph was traced with "
                f"{parameter.dtype}. Cast the parameter, or trace the model with these parameters."
            )


def read_masks_by_path(graph: Graph, masks: Masks) -> dict[Path, np.ndarray]:
    """Returns the masks by path, without those that are `None`.

    Args:
      graph: the graph of the model.
      masks: tree of masks.

    Raises:
      ValueError: a mask belongs to no parameter, has another shape or other entries than 0 and 1,
        or its parameter is not floating.
    """
    arrays = {}
    for parameter, mask in graph.parameters.match_masks(masks):
        array = np.asarray(mask)
        dtype = parameter.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"The masks have a leaf at {parameter.name!r}, whose dtype {dtype} is not "
                "floating. Give it no mask: None."
            )
        check_entries(array, parameter.name)
        arrays[parameter.path] = array
    return arrays


def read_formats(
    formats: Mapping[Path, str] | Mapping[str, str], masked: Mapping[Path, MaskedParameter]
) -> dict[Path, str]:
    """Returns formats by path; raises a ValueError for unknown paths and formats."""
    check_kind("formats", formats, Mapping, "a dict {path: format}")
    chosen = {}
    for key, name in formats.items():
        check_kind("a path of formats", key, str | tuple, "text or a tuple of strings")
        path = tuple(filter(None, key.split("/"))) if isinstance(key, str) else key
        for part in path:
            check_kind(f"a part of the path {key!r} of formats", part, str, "text")
        if path not in masked:
            raise ValueError(
                f"formats has the path {trees.join_names(path)!r}, which has no mask. Masked are "
                f"{trees.listed([trees.join_names(path) for path in masked])}."
            )
        if not isinstance(name, str) or name not in FORMAT_LAYOUTS:
            raise ValueError(f"formats[{key!r}] must be one of {(*FORMAT_LAYOUTS,)}, got {name!r}.")
        chosen[path] = name
    return chosen
