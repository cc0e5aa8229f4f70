"""Random networks of known frameworks: pruned, compact and smaller ones compute what masks do."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.core import trees
from tests import networks
from tests.graph import removal
from tests.properties.strategies import EXAMPLES, FIRST

TOLERANCE = 1e-9
STEPS = 20
# Documented refusals: too many dense parameters, kernels that a cell joins for one product, and
# FanIn of SparseGPT in grouped convolutions.
REFUSALS = r"cannot be met: the sparsest masks|joined with others|prunes whole matrices"


def mask(params, masks):
    """Returns the parameters with 0 outside the masks, by numpy."""
    return trees.map_matched(
        lambda _, x, mask: x if mask is None else jnp.asarray(np.where(mask, x, 0), x.dtype),
        params,
        masks,
    )


def difference(expected, computed):
    """Returns the largest difference, relative to the largest entry."""
    pairs = list(zip(*map(jax.tree.leaves, jax.device_get((expected, computed))), strict=True))
    assert all(one.shape == other.shape for one, other in pairs)
    largest = max(float(np.abs(one).max(initial=0)) for one, _ in pairs)
    return max(float(np.abs(one - other).max(initial=0)) for one, other in pairs) / (largest or 1)


def gradients(apply, params, x):
    """Returns (outputs, gradients of a function of them); integers have zeros."""

    def loss(params):
        outputs = apply(params, x)
        return jnp.sin(outputs).sum(), outputs

    grads, outputs = jax.grad(loss, has_aux=True, allow_int=True)(params)
    zeros = lambda g, p: g if g.dtype == p.dtype else jnp.zeros_like(p)  # noqa: E731
    return outputs, jax.tree.map(zeros, grads, params)


def train(apply, params, x, masks=None):
    """Returns (outputs and gradients of the steps of adam, parameters after them)."""
    tx = optax.adam(0.01, eps=1e-4)  # where a gradient is 0, a smaller eps would divide its error

    def step(carry, _):
        params, state = carry
        outputs, grads = gradients(apply, params, x)
        if masks is not None:
            grads = trees.map_matched(lambda _, g, m: g if m is None else g * m, grads, masks)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (outputs, grads)

    (end, _), results = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
    return results, end


def draw_pruner(rng, graph):
    """Returns a pruner of random weights, of a random pattern, scope and sparsity."""

    def nm(path, param):
        try:
            return graph.nm(1, 2)(path, param)
        except ValueError:  # 2 does not divide the inputs
            return sparsity.Unstructured()

    kinds = [sparsity.Unstructured(), nm, graph.fan_in(2), graph.fan_in(1)]
    names = {leaf.path for leaf in graph.parameters if rng.random() < 0.8}
    are_weights = rng.random() < 0.7  # otherwise biases and scales have masks too
    accepts = graph.is_weight if are_weights else lambda path, param: param.ndim > 0
    kind = kinds[rng.integers(4)] if are_weights else kinds[0]
    is_global = kind is kinds[0] and rng.random() < 0.4
    return sparsity.RandomPruning(
        sparsity_distribution_fn=sparsity.Uniform(
            float(rng.choice([0.3, 0.5, 0.8])),
            filter_fn=lambda path, param: path in names and accepts(path, param),
        ),
        sparsity_type=kind,
        scope=sparsity.Global() if is_global else sparsity.Layerwise(),
    )


def check_compact(rng, network, graph):
    """Compares a compact model and steps of its training with the masked model."""
    masks = draw_pruner(rng, graph).instant_sparsify(network.params)[1]
    masked = mask(network.params, masks)
    model = sparsity.compact(graph, masked, masks)
    if rng.random() < 0.3:
        formats = {path: str(rng.choice(["values", "dense"])) for path in model.formats}
        model = sparsity.compact(graph, masked, masks, formats=formats)
    expected, end = jax.jit(lambda p: train(network.apply, p, network.x, masks))(masked)
    steps, compact_end = jax.jit(lambda p: train(model.apply, p, network.x))(model.params)
    ends = [jax.tree.map(operator.itemgetter(i), steps[1]) for i in (0, -1)]
    computed = steps[0], [mask(model.dense(grads), masks) for grads in ends]
    expected = expected[0], [jax.tree.map(operator.itemgetter(i), expected[1]) for i in (0, -1)]
    assert difference(expected, computed) < TOLERANCE, network.names
    assert difference(end, model.dense(compact_end)) < TOLERANCE, network.names


def check_shrink(seed, network, graph):
    """Compares the model without random channels of its groups with the masked one."""
    groups = graph.groups
    masks = removal.make_masks(graph, groups, removal.choose(groups, seed))
    masks = trees.map_matched(lambda path, _: masks.get(trees.path_names(path)), network.params)
    masked = mask(network.params, masks)
    small = sparsity.shrink(graph, masked, masks)
    outputs, grads = jax.jit(lambda p: gradients(network.apply, p, network.x))(masked)
    computed = jax.jit(lambda p: gradients(small.apply, p, network.x))(small.params)
    expected = outputs, sparsity.shrink(graph, grads, small.plan).params
    assert difference(expected, computed) < TOLERANCE, network.names


def check_budget(network, graph):
    """Checks that masks of a budget leave at most these multiply-adds."""
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.budget(graph, macs=0.5))
    masks = pruner.instant_sparsify(network.params)[1]
    assert graph.macs(masks) <= 0.5 * graph.macs()


def check_oneshot(rng, network, graph):
    """Checks the zeros of a random pruner in one shot, and that no refit adds to an error."""
    names = ["WandaPruning", "RIAPruning", "SparseGPTPruning", "MagnitudePruning"]
    pruner = getattr(sparsity, names[rng.integers(4)])(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
        sparsity_type=graph.fan_in(1) if rng.random() < 0.3 else sparsity.Unstructured(),
    )
    refit = None if rng.random() < 0.5 else sparsity.ADMM()
    batches = [jnp.asarray(rng.normal(size=network.x.shape)) for _ in range(4)]
    pruned, masks, report = sparsity.oneshot(
        pruner, network.apply, network.params, batches, refit=refit
    )
    leaves, kept = trees.leaves_by_path(pruned), trees.leaves_by_path(masks)
    assert {trees.path_names(path) for path in kept} == {*report}
    for path, one in kept.items():
        assert not np.asarray(leaves[path])[np.asarray(one) == 0].any(), path
        assert np.isfinite(leaves[path]).all(), path
        layer = report[trees.path_names(path)]
        assert layer.error <= layer.unrefitted + TOLERANCE, path


def unless_refused(check, *args):
    """Runs a check, which may end with a documented refusal."""
    try:
        check(*args)
    except ValueError as error:
        if not re.search(REFUSALS, str(error)):
            raise


@pytest.mark.slow
@pytest.mark.drawn(500)
@pytest.mark.filterwarnings("ignore:The statistic of .* has .* rows for")
@pytest.mark.filterwarnings("ignore:All inputs of .* met nothing but zeros")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + (EXAMPLES or 4)))
def test_a_random_network_is_pruned_compacted_and_cut_exactly(seed):
    with jax.enable_x64(True):
        rng, network = np.random.default_rng(seed), networks.make(seed)
        graph = sparsity.trace(network.apply, network.params, network.x)
        check_compact(rng, network, graph)
        check_shrink(seed, network, graph)
        unless_refused(check_budget, network, graph)
        unless_refused(check_oneshot, rng, network, graph)
