"""Compares smaller models with masked ones, and counts the channels that stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsity import shrink, trace
from sparsity.core import trees
from tests import helpers
from tests.graph import models, removal


def make_masks(graph, params, groups, seed):
    """Masks that keep some channels of these groups, drawn at random."""
    masks = removal.make_masks(graph, groups, removal.choose(groups, seed))
    return trees.map_matched(lambda path, _: masks.get(trees.path_names(path)), params)


def gradients(fn, params, args):
    """(outputs, gradients of a function of all of them)."""

    def loss(params):
        outputs = fn(params, *args)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(outputs)), outputs

    (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return outputs, grads


def difference(expected, actual):
    """The largest difference of any entry, in units of the largest entry of all."""
    trees_of_numpy = jax.device_get((expected, actual))  # jax would compile for each shape
    pairs = list(zip(*map(jax.tree.leaves, trees_of_numpy), strict=True))
    largest = max(float(np.abs(one).max()) for one, _ in pairs)
    return max(float(np.abs(one - other).max()) for one, other in pairs) / largest


def check(fn, params, args, tolerance, is_each_alone=True):
    """Cuts each group alone, and all of them together."""
    graph = trace(fn, params, *args)
    cuts = [[group] for group in graph.groups if is_each_alone] + [graph.groups]
    assert graph.groups
    smaller = []
    for seed, groups in enumerate(cuts):
        masks = make_masks(graph, params, groups, seed)
        masked = trees.map_matched(
            lambda _, x, mask: x if mask is None else jnp.asarray(np.asarray(x) * mask, x.dtype),
            params,
            masks,
        )
        smaller.append((masked, shrink(graph, masked, masks)))

    @functools.partial(jax.jit, compiler_options=helpers.WITHOUT_EMITTERS)
    def run(trees_of_params):
        return [
            (gradients(fn, masked, args), gradients(small.apply, params, args))
            for (masked, params), (_, small) in zip(trees_of_params, smaller, strict=True)
        ]

    actual = run([(masked, small.params) for masked, small in smaller])
    for ((outputs, grads), small_results), (_, small), groups in zip(
        actual, smaller, cuts, strict=True
    ):
        expected = outputs, shrink(graph, grads, small.plan).params
        assert difference(expected, small_results) <= tolerance, [group.name for group in groups]


def drawn(model, dtype):
    """(params, inputs) of a model."""
    rng = np.random.default_rng(1)
    inputs = [
        jnp.asarray(rng.integers(0, 9, x.shape))
        if x.dtype == jnp.int32
        else jnp.asarray(rng.normal(size=x.shape), dtype)
        for x in model.inputs
    ]
    return models.draw(model.shapes, dtype), inputs


def list_remaining(graph, small):
    """Counts the channels of each group that stay, along the axis of the first member."""
    actual, shapes = [], {leaf.path: leaf.shape for leaf in graph.parameters}
    for group in graph.groups:
        (path, axis), positions = group.members[0], group.positions[0]
        stays = small.plan.kept.get(path, {}).get(axis, np.arange(shapes[path][axis]))
        actual.append(int(np.isin(positions, np.atleast_2d(stays)[0]).any(axis=1).sum()))
    return actual
