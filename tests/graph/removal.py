"""The oracle of channel groups: a model without some channels beside the one that masks them."""

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.shrinking.interpreter import CutInterpreter
from tests import helpers


def choose(groups, seed=0):
    """Of each group, the channels that stay: at least one stays, and one goes."""
    rng = np.random.default_rng(seed)
    return [np.sort(rng.permutation(g.size)[: rng.integers(1, g.size)]) for g in groups]


def make_masks(graph, groups, stay):
    """{path: array of 0 and 1} that masks all channels but those that stay."""
    shapes = {leaf.path: leaf.shape for leaf in graph.parameters}
    masks = {}
    for group, index in zip(groups, stay, strict=True):
        gone = np.setdiff1d(np.arange(group.size), index)
        for (path, axis), positions in zip(group.members, group.positions, strict=True):
            mask = masks.setdefault(path, np.ones(shapes[path]))
            mask[(slice(None),) * axis + (positions[gone].reshape(-1),)] = 0
    return masks


def outputs(graph, fn, params, args, groups, stay):
    """(what the masked model returns, what the smaller one returns), leaf by leaf.

    Statistics that the model carries to its next call are not masked. What it returns of them is
    cut to the channels that stay.
    """
    masks = make_masks(graph, groups, stay)
    values, inputs = graph.model.program.outputs, graph.model.program.inputs
    carried = {  # not what is returned as it was given
        graph.model.parameters[leaf].path
        for i, leaf in graph.model.carried.items()
        if values[i] is not inputs[leaf]
    }

    def masked(path, leaf):
        mask = masks.get(trees.path_names(path))
        if mask is None or trees.path_names(path) in carried:
            return leaf
        return jnp.where(jnp.asarray(mask, bool), leaf, jnp.zeros_like(leaf))

    kept = {group.variable: index for group, index in zip(groups, stay, strict=True)}
    smaller = CutInterpreter(graph.removal, kept)
    arrays = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "shape")]
    cut = [smaller.cut(value, leaf) for value, leaf in zip(inputs, arrays, strict=False)]
    expected = jax.tree.leaves(fn(trees.map_matched(masked, params), *args))
    outputs = smaller.run(graph.model.program, [*cut, *jax.tree.leaves(args)])
    return [smaller.cut(value, x) for value, x in zip(values, expected, strict=True)], outputs


def difference(expected, actual):
    """The largest difference of any output, relative to its largest entry."""
    errors = []
    for one, other in zip(expected, actual, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape, (one.shape, other.shape)
        scale = max(np.abs(one).max(initial=0), 1e-30)
        errors.append(np.abs(one - other).max(initial=0) / scale)
    return max(errors)


def names(graph):
    """Names and sizes of the groups."""
    return [(group.name, group.size) for group in graph.groups]


def check(graph, fn, params, args, tolerance):
    """Cuts each group alone, and all of them together."""
    cuts = [[group] for group in graph.groups if len(graph.groups) > 1] + [graph.groups]

    def run(params):
        return [
            outputs(graph, fn, params, args, cut, choose(cut, seed))
            for seed, cut in enumerate(cuts)
        ]

    compiled = jax.jit(run, compiler_options=helpers.WITHOUT_EMITTERS)
    for cut, pair in zip(cuts, compiled(params), strict=True):
        assert difference(*pair) <= tolerance, [group.name for group in cut]
