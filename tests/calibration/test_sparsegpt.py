"""SparseGPT against a plain numpy program, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration.pruners.sparsegpt import choose_block_sizes, sweep
from sparsity.calibration.statistics.grams import factor_damped_inverse
from tests import helpers
from tests.calibration import oracles


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def prune(weights, statistic, kind=None, half=0.5, **options):
    """Weights and mask, [outputs, inputs], of a kernel."""
    pruner = sparsity.SparseGPTPruning(
        sparsity_distribution_fn=helpers.uniform(half),
        sparsity_type=kind or sparsity.Unstructured(),
        **options,
    )
    pruned, masks = pruner.instant_sparsify(jnp.asarray(weights.T), statistics={(): statistic})
    return np.asarray(pruned).T, np.asarray(masks).T


@pytest.mark.parametrize(
    "sizes",
    helpers.slow_but([(40, 32)], [(40, 1), (40, 32), (40, "d"), (136, 1), (136, 32), (136, 128)]),
    ids=str,
)
@pytest.mark.parametrize("dead", helpers.slow_but([True], [False, True]))
def test_weights_and_masks_are_those_of_numpy(sizes, dead):
    inputs, block = sizes
    weights, x, _ = oracles.layer(inputs, outputs=12, rows=300, rank=20)
    if dead:
        x[:, [0, 5, inputs - 1]] = 0
    block = inputs if block == "d" else block
    pruned, mask = prune(weights, oracles.make_statistic(x), block_size=block)
    expected = oracles.sparsegpt(weights, x.T @ x, 0.5, block=block)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)
    assert helpers.is_positive_zero(pruned)[mask == 0].all()
    assert mask.sum() == helpers.num_kept(weights.size, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("nm", [(2, 4), (4, 8), (1, 3)])
@pytest.mark.parametrize("block", [1, 128])
def test_groups_are_those_of_numpy_whatever_the_block(nm, block):
    weights, x, _ = oracles.layer(72, outputs=12, rows=300, rank=20)
    x[:, 6] = 0
    kind = sparsity.NByM(*nm, axis=0)
    pruned, mask = prune(weights, oracles.make_statistic(x), kind, block_size=block)
    expected = oracles.sparsegpt(weights, x.T @ x, nm=nm)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)
    assert (mask.reshape(12, -1, nm[1]).sum(-1) == nm[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "block"), [(1, 16), (4, 16), (5, 128)])
def test_groups_of_outputs_keep_the_inputs_of_numpy(group, block):
    weights, x, _ = oracles.layer(40, outputs=12, rows=300, rank=20)
    x[:, 6] = 0
    pruned, mask = prune(
        weights, oracles.make_statistic(x), sparsity.FanIn(group), 0.7, block_size=block
    )
    expected = oracles.sparsegpt(weights, x.T @ x, 0.7, block=block, group=group)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)
    assert (mask.sum(1) == helpers.num_kept(40, 0.7)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "block"), [(sparsity.Unstructured(), 32), (sparsity.NByM(2, 4, axis=0), 4)], ids=str
)
def test_what_weights_lose_adds_up_to_the_error_of_the_outputs(pattern, block):
    weights, x, _ = oracles.layer(40, outputs=12, rows=300, rank=20)
    gram = oracles.damped(x.T @ x)
    multiple = choose_block_sizes(block, len(gram))[0]
    factor = factor_damped_inverse(jnp.asarray(x.T @ x), 0.01, np.dtype(float), multiple)
    done = sweep(jnp.asarray(weights.T), factor, pattern, block, 0.5)
    lost = weights - np.asarray(done.weights).T
    np.testing.assert_allclose(jnp.sum(done.errors**2), np.trace(lost @ gram @ lost.T), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("sparsity_", [0.0, 0.3, 0.9, 1.0])
def test_any_sparsity_keeps_as_many_as_the_library_counts(sparsity_):
    weights, x, _ = oracles.layer(37, outputs=5, rows=300)
    pruned, mask = prune(weights, oracles.make_statistic(x), half=sparsity_, block_size=10)
    expected = oracles.sparsegpt(weights, x.T @ x, sparsity_, block=10)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)
    assert mask.sum() == helpers.num_kept(weights.size, sparsity_)


class Comparable(sparsity.Unstructured):
    def __eq__(self, other):
        return type(other) is type(self)


@dataclasses.dataclass(frozen=True)
class Labelled(sparsity.Unstructured):
    labels: list[str] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("pattern", [Comparable(), Labelled()], ids=type)
def test_patterns_of_ones_own_without_a_hash_remove_single_weights(pattern):
    weights, x, _ = oracles.layer(8, outputs=4, rows=50)
    with pytest.raises(TypeError, match="unhashable"):
        hash(pattern)
    pruned, mask = prune(weights, oracles.make_statistic(x), pattern)
    expected = oracles.sparsegpt(weights, x.T @ x, 0.5, block=8)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)
