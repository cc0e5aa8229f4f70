"""The state in nested optimizer states, and trees of masks applied and packed by path."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sparsity
from sparsity.masks import apply_masks, mask_updates, pack_masks, unpack_masks
from sparsity.reports import summarize_intersection, summarize_sparsity
from sparsity.training.state import (
    SparseState,
    get_sparse_state,
    set_sparse_state,
    sharding_like,
)

PARAMS = {"dense": {"kernel": jnp.full((2, 9), 3.0), "bias": jnp.ones(9)}, "head": [jnp.ones(3)]}
KERNEL_MASK = jnp.array([[1, 0, 0, 0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0, 0]], jnp.uint8)
MASKS = {"dense": {"kernel": KERNEL_MASK, "bias": None}, "head": [jnp.array([0, 1, 1], jnp.uint8)]}
STATE = SparseState(masks=MASKS, inner_state=(jnp.ones(2),), count=jnp.int32(5))


# The state itself.


def test_all_fields_default_to_none():
    assert SparseState() == (None,) * 5
    names = ("masks", "inner_state", "target_sparsities", "count", "algorithm_state")
    assert SparseState._fields == names


def test_the_state_is_a_tree_of_arrays_that_goes_through_transforms():
    doubled = jax.jit(lambda state: jax.tree.map(lambda x: x + x, state))(STATE)
    assert isinstance(doubled, SparseState)
    assert jax.tree.structure(doubled) == jax.tree.structure(STATE)
    assert int(doubled.count) == 10


def test_the_state_survives_serialization_by_name():
    plain = serialization.to_state_dict(STATE)
    assert set(plain) == set(SparseState._fields)
    restored = serialization.from_state_dict(jax.tree.map(jnp.zeros_like, STATE), plain)
    assert isinstance(restored, SparseState)
    jax.tree.map(np.testing.assert_array_equal, restored, STATE)


class TrainState(NamedTuple):
    step: int
    opt_state: object


NESTED = {
    "the state": lambda state: state,
    "a chain": lambda state: (optax.EmptyState(), state, optax.EmptyState()),
    "chains": lambda state: ((optax.EmptyState(), (state,)), optax.EmptyState()),
    "a NamedTuple": lambda state: TrainState(3, state),
    "a dictionary": lambda state: {"opt": state, "ema": jnp.ones(2)},
    "MultiSteps": lambda state: optax.MultiStepsState(0, 0, state, None, ()),
    "masked": lambda state: optax.MaskedState(state),
    "inject_hyperparams": lambda state: optax.InjectStatefulHyperparamsState(0, {}, {}, state),
    "multi_transform": lambda state: optax.PartitionState(
        {"a": optax.MaskedState(optax.EmptyState()), "b": optax.MaskedState(state)}
    ),
}
nestings = pytest.mark.parametrize("nest", NESTED.values(), ids=list(NESTED))


@nestings
def test_the_state_is_found_however_nested(nest):
    assert get_sparse_state(nest(STATE)) is STATE


@nestings
def test_only_the_state_is_replaced(nest):
    fresh = SparseState(masks=None, count=jnp.int32(9))
    replaced = set_sparse_state(nest(STATE), fresh)
    assert get_sparse_state(replaced) is fresh
    assert jax.tree.structure(replaced) == jax.tree.structure(nest(fresh))
    assert type(replaced) is type(nest(fresh))


@pytest.mark.parametrize("opt_state", [None, (), optax.EmptyState(), {"a": jnp.ones(2)}, PARAMS])
@pytest.mark.parametrize("access", [get_sparse_state, lambda s: set_sparse_state(s, STATE)])
def test_a_state_without_masks_is_an_error_with_the_remedy(opt_state, access):
    with pytest.raises(ValueError, match=r"holds none.*wrap_optax"):
        access(opt_state)


@pytest.mark.parametrize("access", [get_sparse_state, lambda s: set_sparse_state(s, STATE)])
def test_several_states_are_an_error_with_their_places(access):
    with pytest.raises(ValueError, match="holds 2") as error:
        access({"generator": (STATE,), "critic": STATE})
    assert "['generator'][0]" in str(error.value)
    assert "['critic']" in str(error.value)


def test_an_optimizer_that_is_wrapped_twice_is_an_error():
    with pytest.raises(ValueError, match=r"holds 2, at 'the root', '.inner_state\[0\]'"):
        get_sparse_state(SparseState(inner_state=(STATE,)))


# Trees of masks.


@pytest.mark.parametrize("packed", [False, True])
def test_masks_are_applied_by_path(packed):
    masks = unpack_masks(pack_masks(MASKS, PARAMS), PARAMS) if packed else MASKS
    masked = apply_masks(PARAMS, masks)
    assert jax.tree.structure(masked) == jax.tree.structure(PARAMS)
    np.testing.assert_array_equal(masked["dense"]["kernel"], 3.0 * KERNEL_MASK)
    np.testing.assert_array_equal(masked["head"][0], [0, 1, 1])
    assert masked["dense"]["bias"] is PARAMS["dense"]["bias"]


@pytest.mark.parametrize(
    "masks", [None, dict.fromkeys(PARAMS), {"dense": optax.MaskedNode(), "head": [None]}]
)
def test_leaves_without_masks_are_returned_as_they_are(masks):
    masked = apply_masks(PARAMS, masks)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (masked, PARAMS)), strict=True))


def test_masks_of_nnx_variables_meet_bare_gradients():
    masks = nnx.State({"w": nnx.Param(jnp.array([0, 1], jnp.uint8)), "b": nnx.Param(None)})
    masked = mask_updates({"w": jnp.array([5.0, 6.0]), "b": jnp.ones(2)}, masks)
    np.testing.assert_array_equal(masked["w"], [0, 6])
    np.testing.assert_array_equal(masked["b"], [1, 1])


def test_a_mask_without_its_leaf_is_an_error_with_path_and_role():
    with pytest.raises(ValueError, match="The gradients have no leaf at 'dense/kernel'"):
        mask_updates({"head": PARAMS["head"]}, MASKS, "gradients")


def test_parameters_need_a_mask_or_none_and_updates_do_not():
    masks = {"dense": MASKS["dense"]}
    with pytest.raises(ValueError, match="The masks have nothing for 'head/0'"):
        apply_masks(PARAMS, masks)
    assert mask_updates(PARAMS, masks)["head"][0] is PARAMS["head"][0]


@pytest.mark.parametrize("shape", [(2, 8), (9, 2), (2, 10), (2,), ()])
def test_a_mask_of_another_shape_is_an_error_with_both_shapes(shape):
    params = {"dense": {"kernel": jnp.zeros(shape)}}
    masks = {"dense": {"kernel": jnp.ones((2, 9), jnp.uint8)}}
    with pytest.raises(ValueError, match="'dense/kernel'") as error:
        apply_masks(params, masks)
    assert str(shape) in str(error.value)
    assert "(2, 9)" in str(error.value)


def test_packing_keeps_the_tree_and_its_dense_leaves():
    packed = pack_masks(MASKS, PARAMS)
    assert jax.tree.structure(packed) == jax.tree.structure(MASKS)
    np.testing.assert_array_equal(packed["dense"]["kernel"], [[0b10000000, 0b10000000], [64, 0]])
    np.testing.assert_array_equal(packed["head"][0], [0b01100000])
    assert packed["dense"]["bias"] is None


def test_unpacking_undoes_packing_and_neither_can_be_done_twice():
    packed = pack_masks(MASKS, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, unpack_masks(packed, PARAMS), MASKS)
    with pytest.raises(ValueError, match=r"'dense/kernel'.*use_packed_masks=False"):
        pack_masks(packed, PARAMS)
    with pytest.raises(ValueError, match=r"'dense/kernel'.*use_packed_masks=True"):
        unpack_masks(MASKS, PARAMS)


@pytest.mark.parametrize("fit", [pack_masks, unpack_masks])
def test_no_masks_need_no_packing(fit):
    assert fit(None, PARAMS) is None
    assert fit({"dense": None, "head": None}, PARAMS) == {"dense": None, "head": None}


@pytest.mark.parametrize("fit", [pack_masks, unpack_masks])
def test_a_leaf_without_a_mask_and_without_none_is_named(fit):
    with pytest.raises(ValueError, match="nothing for 'head/0'"):
        fit({"dense": None}, PARAMS)


@pytest.mark.parametrize("fit", [pack_masks, unpack_masks])
def test_masks_that_no_parameter_has_are_an_error_with_their_path(fit):
    with pytest.raises(ValueError, match="dense/kernel"):
        fit(MASKS, {"head": PARAMS["head"]})


# Shardings of a whole state.


def test_a_parameter_without_a_sharding_is_an_error_with_its_path():
    shapes = jax.eval_shape(lambda: PARAMS)
    with pytest.raises(ValueError, match="'dense/bias' of params has no sharding"):
        sharding_like(shapes, optax.adam(0.1).init(PARAMS))


def test_on_one_device_everything_is_there():
    state = optax.adam(0.1).init(PARAMS)
    shardings = sharding_like(PARAMS, state)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert set(jax.tree.leaves(shardings)) == {PARAMS["head"][0].sharding}


@pytest.mark.parametrize(
    ("shape", "axes", "row", "column"),
    [((4, 4), "ab", "a", "b"), ((2, 4, 4), "abc", "ab", "ac"), ((4, 4, 8), "abc", "ab", "ac")],
)
def test_factored_moments_of_square_parameters_lie_as_the_axes_that_they_keep(
    shape, axes, row, column
):
    mesh = jax.make_mesh((1, 1, 1), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    placed = NamedSharding(mesh, PartitionSpec(*axes))
    params = {"v_col": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)}
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    shardings = sharding_like(params, jax.eval_shape(tx.init, params))
    assert shardings.v_row["v_col"].spec == PartitionSpec(*row)
    assert shardings.v_col["v_col"].spec == PartitionSpec(*column)


# Summaries of a state.


@pytest.mark.parametrize("packed", [False, True])
def test_summaries_take_a_state_for_its_masks(packed):
    masks = pack_masks(MASKS, PARAMS) if packed else MASKS
    state = (optax.EmptyState(), STATE._replace(masks=masks))
    assert summarize_intersection(state, state)["_total_intersection"] == 1.0
    other = {"dense": {"kernel": jnp.ones((2, 9), jnp.uint8), "bias": None}, "head": MASKS["head"]}
    other = pack_masks(other, PARAMS) if packed else other
    other = STATE._replace(masks=other)
    # Of 18 + 2 ones, three in the kernel and two in the head are ones of the state, too.
    assert summarize_intersection(other, state)["_total_intersection"] == 5 / 20
    if packed:
        with pytest.raises(ValueError, match=r"'dense/kernel' is uint8.*packed bits.*unpack_masks"):
            summarize_sparsity(state)
    else:
        assert summarize_sparsity(state)["dense/kernel"] == 15 / 18
    with pytest.raises(ValueError, match="holds 2"):
        summarize_sparsity((STATE, STATE))


def test_an_optimizer_without_pruning_refuses_a_state_without_masks_too():
    tx = sparsity.NoPruning().wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match="got a state of type EmptyState"):
        tx.update(jnp.ones(2), optax.EmptyState(), jnp.ones(2))
