"""Norms of leaves, which divide scores that compete across leaves."""

import jax
import numpy as np
import pytest

from sparsity.masks.norms import norms
from sparsity.selection import Ranked


@pytest.mark.slow
def test_norms_on_hosts_and_devices_are_those_of_the_finite_scores_in_numpy():
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=shape).astype(np.float32) for shape in ((50,), (8, 5), (1, 1))]
    leaves += [1e-3 * leaves[0], np.full(5000, 3, np.float32), np.zeros(4, np.float32)]
    leaves += [1e30 * leaves[0], 1e-15 * leaves[0]]
    leaves[1][0, :3] = np.nan, np.inf, -np.inf
    expected = [np.linalg.norm(x[np.isfinite(x)].astype(np.float64)) for x in leaves]
    on_host = np.ldexp(*norms([Ranked.wrap(x) for x in leaves]))
    # Concrete arrays of a CPU are those of the host: only a program computes on a device.
    compiled = jax.jit(lambda leaves: norms([Ranked.wrap(x) for x in leaves]))
    on_device = np.ldexp(*compiled(leaves))
    np.testing.assert_allclose(on_host, expected, rtol=1e-6)
    np.testing.assert_array_equal(on_host, on_device)
    tiny = [np.float32(1e-38) * x for x in leaves]  # XLA takes most of these for 0
    jax.tree.map(np.testing.assert_array_equal, norms([*map(Ranked.wrap, tiny)]), compiled(tiny))


def test_a_leaf_that_is_not_cut_into_rows_has_the_norm_of_numpy():
    # A prime number of entries: sums of so many squares take three digits.
    leaf = np.random.default_rng(1).normal(size=131_071).astype(np.float32)
    compiled = jax.jit(lambda leaves: norms([Ranked.wrap(x) for x in leaves]))([leaf])
    expected = [np.linalg.norm(leaf.astype(np.float64))]
    np.testing.assert_allclose(np.ldexp(*compiled), expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, compiled, norms([Ranked.wrap(leaf)]))
