"""Masks packed to bits, and masks applied to weights and straight through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity import masks
from sparsity.training.state import SparseState
from tests.masks.mask_oracles import draw

NAN, INF = float("nan"), float("inf")

# Packing to bits.

SHAPES = [(), (1,), (7,), (8,), (3, 1), (5, 9), (2, 3, 17), (3, 0)]


def random_mask(shape):
    return np.random.default_rng(7).integers(0, 2, shape).astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("value", ["random", "ones"])
def test_packing_is_undone_by_unpacking(shape, value):
    mask = {"random": random_mask, "ones": np.ones}[value](shape)
    mask = jnp.asarray(mask, jnp.uint8)
    param = jnp.zeros(shape)
    packed = masks.pack(mask, param)
    assert packed.shape == masks.packed_shape(shape)
    assert packed.dtype == jnp.uint8
    restored = masks.unpack(packed, param)
    assert (restored.shape, restored.dtype) == (shape, jnp.uint8)
    np.testing.assert_array_equal(restored, mask)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (5, 9), (2, 3, 17)], ids=str)
def test_rows_are_packed_to_whole_bytes_highest_bit_first(shape):
    mask = random_mask(shape)
    rows = mask.reshape(-1, shape[-1])
    bits = ["".join(map(str, row)).ljust(-(-shape[-1] // 8) * 8, "0") for row in rows]
    expected = [[int(row[i : i + 8], 2) for i in range(0, len(row), 8)] for row in bits]
    packed = masks.pack(jnp.asarray(mask), jnp.zeros(shape))
    np.testing.assert_array_equal(packed, np.reshape(expected, packed.shape))


def test_a_packed_mask_takes_one_bit_a_weight():
    assert masks.pack(jnp.ones((100, 64), jnp.uint8), jnp.zeros((100, 64))).nbytes == 100 * 8


def test_masks_that_are_not_uint8_can_be_packed():
    packed = masks.pack(jnp.array([True, False, True]), jnp.zeros(3))
    np.testing.assert_array_equal(packed, [0b10100000])


def test_a_shape_and_dtype_is_enough_to_pack_and_unpack():
    like = jax.ShapeDtypeStruct((2, 9), jnp.bfloat16)
    mask = jnp.asarray(random_mask((2, 9)))
    np.testing.assert_array_equal(masks.unpack(masks.pack(mask, like), like), mask)


# Applying masks.

MASK = np.array([1, 0, 1, 0, 0], np.uint8)


def read(mask, param, packed):
    """The mask, after packing and unpacking or as it is."""
    return masks.unpack(masks.pack(mask, param), param) if packed else mask


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.5, 2, -3, 4, 5], jnp.float32),
        ([1.5, 2, -3, 4, 5], jnp.bfloat16),
        ([1.5, 2, -3, 4, 5], jnp.float16),
        ([1, 2, -3, 4, 5], jnp.int32),
        ([1, 2, 3, 4, 5], jnp.uint8),
        ([1, 1, 1, 1, 0], jnp.bool_),
        ([1 + 2j, 3j, -4, 5, 6j], jnp.complex64),
    ],
    ids=str,
)
def test_kept_entries_pass_and_others_are_zero_in_the_same_dtype(values, dtype, packed):
    param = jnp.asarray(values, dtype)
    mask = read(jnp.asarray(MASK), param, packed)
    masked = masks.apply_masks(param, mask)
    assert masked.dtype == param.dtype
    np.testing.assert_array_equal(masked, jnp.asarray([values[0], 0, values[2], 0, 0], dtype))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64], ids=str)
def test_nan_inf_and_minus_zero_become_plus_zero_where_pruned(dtype, packed):
    param = jnp.array([NAN, NAN, -INF, INF, -0.0], dtype)
    mask = read(jnp.asarray(MASK), param, packed)
    masked = np.asarray(masks.apply_masks(param, mask)).astype(np.complex64)
    assert np.isnan(masked[0])
    assert masked[2] == -INF
    np.testing.assert_array_equal(masked[[1, 3, 4]], 0)
    assert not np.signbit(masked[[1, 3, 4]].real).any()
    assert not np.signbit(masked[[1, 3, 4]].imag).any()


def test_a_kept_minus_zero_stays():
    assert np.signbit(masks.apply_mask(jnp.array([-0.0]), np.ones(1, np.uint8)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_and_unpacked_masks_do_the_same(shape):
    param = jnp.asarray(draw(shape)) + 1000
    mask = jnp.asarray(random_mask(shape))
    packed = jax.jit(lambda param, bits: masks.apply_masks(param, masks.unpack(bits, param)))(
        param, masks.pack(mask, param)
    )
    np.testing.assert_array_equal(packed, masks.apply_mask(param, mask))
    np.testing.assert_array_equal(packed, np.where(mask, param, 0))


@pytest.mark.parametrize(
    ("packed", "mask", "named"),
    [
        (True, np.zeros((4, 16), np.uint8), r"'w' has shape \(4, 16\).*needs \(4, 2\).*pack_masks"),
        (False, np.zeros((4, 2), np.uint8), r"'w' has shape \(4, 2\).*needs \(4, 16\).*unpack"),
        (True, np.zeros((4, 3), np.uint8), r"'w' has shape \(4, 3\).*needs \(4, 2\).*pack"),
        (True, np.zeros((4, 2), np.int32), r"packed mask of 'w' has dtype int32.*pack_masks"),
        (True, np.zeros(8, np.uint8), r"'w' has shape \(8,\).*needs \(4, 2\)"),
    ],
)
def test_a_mask_by_hand_that_is_not_stored_as_the_updater_says_is_an_error(packed, mask, named):
    updater = sparsity.MagnitudePruning(use_packed_masks=packed)
    with pytest.raises(ValueError, match=named):
        updater.post_gradient_update({"w": jnp.ones((4, 16))}, SparseState({"w": mask}))


@pytest.mark.parametrize("kept", [1, 0b10000000])
def test_the_byte_of_a_row_of_one_weight_may_be_packed_or_not(kept):
    bits = jnp.array([[kept], [0]], jnp.uint8)
    np.testing.assert_array_equal(masks.unpack(bits, jnp.ones((2, 1))), [[1], [0]])


@pytest.mark.parametrize(
    ("param", "mask"),
    [("x", np.ones(3)), ([1.0], [1]), (np.ones(3), "m"), (np.ones((2, 3)), np.ones(3)), ("x", "x")],
    ids=str,
)
def test_what_is_no_array_of_the_shape_of_its_mask_is_refused(param, mask):
    with pytest.raises(ValueError, match="param and mask must be arrays of one shape, got"):
        masks.apply_mask(param, mask)


def test_without_a_mask_the_parameter_itself_is_returned():
    param = object()
    assert masks.apply_mask(param, None) is param


STRAIGHT_THROUGH = masks.apply_mask_straight_through


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_straight_through_masks_values_and_passes_gradients(compiled):
    param = jnp.array([1.0, NAN, 3.0, INF, 5.0])
    weights = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])
    mask = jnp.asarray(MASK)
    wrap = jax.jit if compiled else lambda f: f

    forward = wrap(STRAIGHT_THROUGH)(param, mask)
    np.testing.assert_array_equal(forward, [1, 0, 3, 0, 0])

    backward = wrap(jax.grad(lambda p, m: jnp.vdot(weights, STRAIGHT_THROUGH(p, m))))(param, mask)
    np.testing.assert_array_equal(backward, weights)

    out, tangent = wrap(lambda p, m, t: jax.jvp(lambda p: STRAIGHT_THROUGH(p, m), (p,), (t,)))(
        param, mask, weights
    )
    np.testing.assert_array_equal(out, [1, 0, 3, 0, 0])
    np.testing.assert_array_equal(tangent, weights)

    _, pull = jax.vjp(lambda p: STRAIGHT_THROUGH(p, mask), param)
    np.testing.assert_array_equal(wrap(pull)(weights)[0], weights)


def test_the_gradient_flows_through_the_masked_value():
    # d/dp (mask * p)^2, straight through, is 2 * (mask * p): zero where pruned.
    grad = jax.grad(lambda p: jnp.sum(STRAIGHT_THROUGH(p, MASK) ** 2))(jnp.arange(1.0, 6.0))
    np.testing.assert_array_equal(grad, [2, 0, 6, 0, 0])


def test_straight_through_without_a_mask_is_the_identity():
    value, grad = jax.value_and_grad(lambda p: jnp.sum(STRAIGHT_THROUGH(p, None)))(jnp.ones(3))
    assert value == 3
    np.testing.assert_array_equal(grad, np.ones(3))


@pytest.mark.parametrize("compile_", [lambda fn: fn, jax.jit])
def test_entries_stay_where_a_mask_of_any_dtype_is_not_zero(compile_):
    param = jnp.arange(1.0, 5.0)
    for mask in ([0, 1, -1, 2], [0.0, 0.5, -0.5, np.inf], [False, True, True, True]):
        kept = compile_(masks.apply_mask)(param, jnp.asarray(mask))
        np.testing.assert_array_equal(kept, [0.0, 2.0, 3.0, 4.0])
