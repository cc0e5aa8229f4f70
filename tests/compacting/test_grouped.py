"""Products of kept values agree with dense ones, and groups are found in masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.compacting import grouped as grouping, grouped_products as grouped
from tests import eight_devices

INPUTS, OUTPUTS, GROUP, K = 19, 22, 4, 5  # the last of 6 groups has two outputs
GROUPS = 6


def make_indices(seed=0, dtype=np.uint16):
    """Returns sorted indices [groups, k]; the last two of group 1 are padding."""
    rng = np.random.default_rng(seed)
    indices = np.stack([np.sort(rng.permutation(INPUTS)[:K]) for _ in range(GROUPS)])
    indices[1, 3:] = INPUTS
    return indices.astype(dtype)


def normal(*shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    return (values + 1j * rng.normal(size=shape) if np.issubdtype(dtype, np.complexfloating)
            else values).astype(dtype)  # fmt: skip


def case(rows=3, dtype=np.float32, seed=0):
    """Returns values, indices and x."""
    values = normal(GROUPS, K, GROUP, seed=seed, dtype=dtype)
    return values, make_indices(seed), normal(rows, INPUTS, seed=seed + 1, dtype=dtype)


def support(indices):
    """Returns which values [groups, k, group] stand for entries of the matrix."""
    columns = np.arange(GROUPS * GROUP).reshape(GROUPS, 1, GROUP)
    return (indices[..., None] < INPUTS) & (columns < OUTPUTS)


def matrix(values, indices):
    """Returns the dense matrix, entry by entry."""
    dense = np.zeros((INPUTS, OUTPUTS), values.dtype)
    for g, j, o in np.argwhere(support(indices)):
        dense[indices[g, j], g * GROUP + o] = values[g, j, o]
    return dense


def entries(dense, indices):
    """Returns the entries of a dense matrix at the support, 0 elsewhere, entry by entry."""
    values = np.zeros((GROUPS, K, GROUP), dense.dtype)
    for g, j, o in np.argwhere(support(indices)):
        values[g, j, o] = dense[indices[g, j], g * GROUP + o]
    return values


def product(values, indices, x, **options):
    return grouped.grouped_product(values, indices, x, OUTPUTS, **options)


@pytest.fixture(params=[1, 2, 4, 6], ids="{} groups a step".format)
def chunk(request, monkeypatch):
    """The number of groups that a step of the loop multiplies."""
    monkeypatch.setattr(grouped, "_run_in_chunks", lambda run, *_: run(request.param))


@pytest.mark.usefixtures("chunk")
def test_products_and_gradients_are_those_of_the_dense_matrix_however_many_groups_a_step_takes():
    values, indices, x = case()
    dy = normal(3, OUTPUTS, seed=2)
    dense = matrix(values, indices)

    @jax.jit
    def run(values, x):
        y, pull = jax.vjp(lambda values, x: product(values, indices, x), values, x)
        return y, *pull(dy)

    y, dvalues, dx = run(values, x)
    np.testing.assert_allclose(y, x @ dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dvalues, entries(x.T @ dy, indices), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ dense.T, rtol=1e-4, atol=1e-5)


def test_values_at_padding_and_beyond_the_outputs_contribute_nothing():
    values, indices, x = case()
    stray = np.where(support(indices), values, 7)
    np.testing.assert_array_equal(product(stray, indices, x), product(values, indices, x))


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.complex128])
def test_other_dtypes_follow_the_conventions_of_dense_products(dtype):
    with jax.enable_x64(True):
        values, indices, x = case(dtype=dtype)
        dy = normal(3, OUTPUTS, seed=2, dtype=dtype)
        y, pull = jax.vjp(lambda values, x: product(values, indices, x), values, x)
        expected, dense_pull = jax.vjp(jnp.matmul, x, matrix(values, indices))
        dvalues, dx = pull(dy)
        dense_dx, dense_dvalues = dense_pull(jnp.asarray(dy))
    assert y.dtype == dvalues.dtype == dx.dtype == dtype
    close = functools.partial(
        np.testing.assert_allclose, rtol=1e-4 if dtype == np.complex64 else 1e-12, atol=1e-5
    )
    close(y, expected)
    close(dvalues, entries(np.asarray(dense_dvalues), indices))
    close(dx, dense_dx)


@pytest.mark.parametrize("preferred", [None, np.float32])
def test_bfloat16_is_summed_in_float32(preferred):
    count = 1001  # in bfloat16 a sum of ones stops at 256
    values = jnp.ones((2, count, 4), jnp.bfloat16)
    indices = jnp.broadcast_to(jnp.arange(count), (2, count))
    x = jnp.ones((3, count), jnp.bfloat16)

    def run(values, x):
        return grouped.grouped_product(values, indices, x, 8, preferred_element_type=preferred)

    y, pull = jax.vjp(run, values, x)
    dvalues, dx = pull(y)
    sums = np.float32(count).astype(y.dtype)
    assert y.dtype == (preferred or jnp.bfloat16)
    assert dvalues.dtype == dx.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, np.full((3, 8), sums))
    np.testing.assert_array_equal(dvalues, np.full(values.shape, 3 * sums, jnp.bfloat16))
    np.testing.assert_array_equal(dx, np.full(x.shape, 8 * sums, jnp.bfloat16))


def test_rows_of_the_gradient_are_summed_over_groups_in_float32():
    groups = 300
    values = jnp.ones((groups, 1, 1), jnp.bfloat16)
    indices = jnp.zeros((groups, 1), jnp.int32)
    x = jnp.ones((1, 1), jnp.bfloat16)
    dx = jax.grad(lambda x: grouped.grouped_product(values, indices, x, groups).sum())(x)
    assert dx == 300


def test_dtypes_are_promoted_and_gradients_keep_their_own():
    values, indices, x = case()
    x = x.astype(jnp.bfloat16)
    y, pull = jax.vjp(lambda values, x: product(values, indices, x), values, x)
    assert y.dtype == np.float32
    assert [d.dtype for d in pull(y)] == [np.float32, jnp.bfloat16]
    np.testing.assert_allclose(
        y, x.astype(np.float32) @ matrix(values, indices), rtol=1e-4, atol=1e-5
    )


def loss(values, indices, x):
    return jnp.sum(jnp.sin(product(values, indices, x)))


gradients = jax.jit(jax.grad(loss, (0, 2)))


def dense_gradients(values, indices, x):
    """Returns the gradients of `loss` in numpy."""
    dense = matrix(values, indices)
    dy = np.cos(x @ dense)
    return entries(x.T @ dy, indices), dy @ dense.T


def check(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def stacked(count):
    arrays = zip(*(case(seed=10 * i) for i in range(count)), strict=True)
    return tuple(np.stack(a) for a in arrays)


def test_experts_are_mapped_over():
    experts = stacked(2)
    expected = [dense_gradients(*arrays) for arrays in zip(*experts, strict=True)]
    check(jax.vmap(gradients)(*experts), [np.stack(a) for a in zip(*expected, strict=True)])


def test_batches_of_inputs_are_mapped_over():
    values, indices, _ = case()
    x = normal(2, 3, INPUTS, seed=4)
    dvalues, dx = jax.vmap(gradients, (None, None, 0))(values, indices, x)
    expected = [dense_gradients(values, indices, a) for a in x]
    check((dvalues, dx), [np.stack(a) for a in zip(*expected, strict=True)])


@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_scanned_with_donated_values(remat):
    """The sum of two layers of the same inputs, each with its own values and indices."""
    values, indices, x = stacked(2)

    def body(total, layer):
        return total + loss(layer[0], layer[1], x[0]), None

    def total(values):
        return jax.lax.scan(jax.checkpoint(body) if remat else body, 0.0, (values, indices))[0]

    step = jax.jit(lambda values: values - jax.grad(total)(values), donate_argnums=0)
    expected = [dense_gradients(v, i, x[0])[0] for v, i in zip(values, indices, strict=True)]
    donated = jnp.asarray(values)
    check([step(donated)], [values - np.stack(expected)])
    assert donated.is_deleted()


def test_forward_derivatives_of_gradients_are_those_of_the_dense_matrix():
    values, indices, x = case()
    tangents = normal(*values.shape, seed=7), normal(*x.shape, seed=8)
    gradient = jax.grad(lambda values, x: loss(values, indices, x), (0, 1))
    computed = jax.jit(lambda *args: jax.jvp(gradient, args, tangents)[1])(values, x)
    dense, tangent = matrix(values, indices), matrix(tangents[0], indices)
    y = x @ dense
    dy = np.cos(y)
    ddy = -np.sin(y) * (tangents[1] @ dense + x @ tangent)
    expected = entries(tangents[1].T @ dy + x.T @ ddy, indices), ddy @ dense.T + dy @ tangent.T
    check(computed, expected)


# The inputs that all groups read take 0.9 MB and 26 MB, the dense matrix 2 MB.
@pytest.mark.parametrize(("rows", "k"), [(128, 26), (500, 200)])
def test_a_training_step_allocates_no_dense_matrix_and_gathers_some_groups_at_a_time(rows, k):
    inputs, outputs, group = 512, 1024, 16
    structs = (
        jax.ShapeDtypeStruct((outputs // group, k, group), jnp.float32),
        jax.ShapeDtypeStruct((outputs // group, k), jnp.uint16),
        jax.ShapeDtypeStruct((rows, inputs), jnp.float32),
    )

    def run(values, indices, x):
        return jnp.sum(jnp.sin(grouped.grouped_product(values, indices, x, outputs)))

    compiled = jax.jit(jax.grad(run, (0, 2))).lower(*structs).compile()
    activations = 4 * rows * (inputs + outputs)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    dense = 4 * inputs * outputs
    assert temporaries < dense + 3 * activations
    assert f"f32[{inputs},{outputs}]" not in compiled.as_text()
    assert f"f32[{outputs},{inputs}]" not in compiled.as_text()


def test_values_become_a_matrix_exactly():
    values, indices, _ = case()
    dense = matrix(values, indices)
    np.testing.assert_array_equal(grouped.scatter_groups(values, indices, INPUTS, OUTPUTS), dense)


@pytest.mark.slow
@eight_devices.KINDS
def test_products_are_sharded_by_rows_and_groups(kind):
    eight_devices.run("grouped", kind)


def fan_in(outputs, inputs, group, k, seed=0):
    """Returns a mask whose groups of outputs keep k inputs each."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(inputs) < k for _ in range(-(-outputs // group))]
    return np.repeat(rows, group, axis=0)[:outputs]


def unfold(size, indices, outputs, inputs):
    """Returns the mask that indices stand for."""
    mask = np.zeros((outputs, inputs + 1), bool)
    for output in range(outputs):
        mask[output, indices[output // size]] = True
    return mask[:, :inputs]


@pytest.mark.parametrize(("outputs", "group"), [(64, 16), (64, 64), (60, 16), (20, 5)])
def test_the_largest_group_is_found_in_the_mask(outputs, group):
    mask = fan_in(outputs, 40, group, 6)
    size, indices = grouping.find_groups(mask)
    assert size == group
    assert indices.shape == (-(-outputs // group), 6)
    assert indices.dtype == np.uint16
    np.testing.assert_array_equal(unfold(size, indices, outputs, 40), mask)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        (sparsity.FanIn(16, axis=-2), 16),
        (sparsity.FanIn(64, axis=-2), 64),
        (sparsity.Block((8, 16)), 16),
        (sparsity.Channel(0), 128),  # the same inputs for all outputs
    ],
    ids=["FanIn(16)", "FanIn(64)", "Block", "Channel"],
)
def test_masks_of_patterns_are_groups(pattern, size):
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=lambda _: 0.75, sparsity_type=pattern
    )
    _, mask = updater.instant_sparsify(jnp.asarray(normal(64, 128)))
    actual, indices = grouping.find_groups(np.asarray(mask).T)
    assert actual == size
    np.testing.assert_array_equal(unfold(size, indices, 128, 64), np.asarray(mask).T)


def test_a_matrix_of_one_output_is_one_group_or_none():
    mask = np.array([[1, 0, 1]])
    assert grouping.find_groups(mask) is None
    size, indices = grouping.find_groups(mask, is_single=True)
    assert (size, indices.tolist()) == (1, [[0, 2]])


def test_dead_outputs_are_groups_of_padding():
    mask = np.repeat([[1, 1, 0], [0, 0, 0], [0, 1, 1]], 4, axis=0).astype(np.uint8)
    size, indices = grouping.find_groups(mask)
    assert size == 4
    np.testing.assert_array_equal(indices, [[0, 1], [3, 3], [1, 2]])


def test_matrices_of_a_stack_have_the_same_group_and_number_of_inputs():
    masks = np.stack([fan_in(32, 20, 16, 6), fan_in(32, 20, 8, 5, seed=1)])
    size, indices = grouping.find_groups(masks)
    assert (size, indices.shape) == (8, (2, 4, 6))
    for mask, each in zip(masks, indices, strict=True):
        np.testing.assert_array_equal(unfold(size, each, 32, 20), mask)


def test_each_output_can_be_a_group():
    size, indices = grouping.find_groups(fan_in(64, 40, 16, 6), is_single=True)
    assert (size, indices.shape) == (1, (64, 6))


def test_masks_without_groups_and_those_of_much_padding_are_refused():
    assert grouping.find_groups(fan_in(64, 40, 2, 6)) is None
    mask = np.repeat([[1] * 40, *[[0] * 39 + [1]] * 3, [0] * 40], 4, axis=0)
    assert grouping.find_groups(mask) is None  # 800 entries for 43 * 4
    padded = np.repeat([[1] * 2 + [0] * 38, [0] * 39 + [1]], 4, axis=0)
    assert grouping.find_groups(padded)[0] == 4  # 16 entries for 12


def test_arguments_that_do_not_fit_are_named():
    values, indices, x = case()
    for arrays in (
        (values, indices[:, 1:], x),
        (values[0], indices, x),
        (values, indices, x[0]),
        (values, indices, "a"),
    ):
        with pytest.raises(ValueError, match=r"values must be .groups, k, group., .*got shapes"):
            product(*arrays)
    with pytest.raises(ValueError, match=r"outputs must be an integer, got outputs = 3\.0"):
        grouped.grouped_product(values, indices, x, 3.0)
    with pytest.raises(ValueError, match="outputs = 20"):
        grouped.grouped_product(values, indices, x, 20)
