"""Products of kept values on eight devices: their values, gradients and shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sparsity.compacting import grouped_products as grouped

INPUTS, GROUPS, K, GROUP, ROWS = 16, 8, 5, 4, 8
RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(GROUPS, K, GROUP)).astype(np.float32)
INDICES = np.stack([np.sort(RNG.permutation(INPUTS)[:K]) for _ in range(GROUPS)])
X = RNG.normal(size=(ROWS, INPUTS)).astype(np.float32)
DENSE = np.zeros((INPUTS, GROUPS, GROUP), np.float32)
for g in range(GROUPS):
    DENSE[INDICES[g], g] = VALUES[g]
DENSE = DENSE.reshape(INPUTS, -1)


def loss(values, indices, x, outputs):
    return jnp.sum(jnp.sin(grouped.grouped_product(values, indices, x, outputs)))


def expected_gradients(outputs):
    """Returns the gradients of `loss` in numpy."""
    dy = np.cos(X @ DENSE) * (np.arange(GROUPS * GROUP) < outputs)
    by_group = (X.T @ dy).reshape(INPUTS, GROUPS, GROUP)
    return np.stack([by_group[INDICES[g], g] for g in range(GROUPS)]), dy @ DENSE.T


def check(gradients, expected):
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def gradients_agree_and_lie_where_values_and_inputs_lie(devices):
    for outputs in (GROUPS * GROUP, GROUPS * GROUP - 2):
        step = jax.jit(jax.grad(functools.partial(loss, outputs=outputs), (0, 2)))
        expected = expected_gradients(outputs)
        for groups, *inputs in (
            (None, None),
            (None, "a"),
            ("b", "a"),
            (("a", "b"), None),
            ("a", "a"),
            (None, "a", "b"),
        ):
            with jax.set_mesh(devices.mesh):
                values, indices = devices.put(VALUES, groups), devices.put(INDICES, groups)
                x = devices.put(X, *inputs)
                gradients = step(values, indices, x)
            check(gradients, expected)
            if devices.is_explicit:
                for a, b in zip(gradients, (values, x), strict=True):
                    assert a.sharding.is_equivalent_to(b.sharding, b.ndim)


def products_run_within_shard_map(devices):
    """Gradients of values that all devices share are summed over the devices' rows."""

    @functools.partial(
        jax.shard_map, mesh=devices.mesh, in_specs=(P("b"), P("b"), P("a")), out_specs=P("a", "b")
    )
    def multiply(values, indices, x):
        return grouped.grouped_product(values, indices, x, values.shape[0] * GROUP)

    def total(values, x, indices):
        return jnp.sum(jnp.sin(multiply(values, indices, x)))

    with jax.set_mesh(devices.mesh):
        values, x = devices.put(VALUES, "b"), devices.put(X, "a")
        gradients = jax.jit(jax.grad(total, (0, 1)))(values, x, devices.put(INDICES, "b"))
    check(gradients, expected_gradients(GROUPS * GROUP))


_BOTH = [
    gradients_agree_and_lie_where_values_and_inputs_lie,
    products_run_within_shard_map,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
