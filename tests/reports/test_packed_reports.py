"""Reports on states whose masks are packed: right, or an error that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity

_MASK = (np.arange(40).reshape(4, 10) % 3 == 0).astype(np.uint8)  # 14 of 40


def _state(packed, mask=_MASK, kind=None):
    trainer = sparsity.StaticRandomSparse(
        use_packed_masks=packed, sparsity_type=kind or sparsity.Unstructured()
    )
    params = {"w": jnp.ones(mask.shape), "b": jnp.ones(mask.shape[-1])}
    tx = trainer.wrap_optax(optax.adam(0.1), masks={"w": mask, "b": None})
    return params, tx.init(params), trainer


def test_the_entries_of_packed_masks_cannot_be_counted():
    _, state, _ = _state(packed=True)
    for place in (state, (optax.EmptyState(), state)):
        with pytest.raises(ValueError, match=r"Leaf 'w' is uint8 with a byte of .*unpack_masks"):
            sparsity.summarize_sparsity(place)
    _, plain, _ = _state(packed=False)
    assert sparsity.summarize_sparsity(plain)["w"] == 26 / 40


def test_packed_masks_without_their_state_are_refused():
    params, state, _ = _state(packed=True)
    in_jit = jax.jit(sparsity.summarize_sparsity)(state.masks)
    assert np.isnan(in_jit["w"])
    assert np.isnan(in_jit["_total_sparsity"])
    with pytest.raises(ValueError, match=r"'w' is uint8 with a byte of \d+.*unpack_masks"):
        sparsity.summarize_sparsity(state.masks)
    with pytest.raises(ValueError, match="'0' is uint8"):
        sparsity.summarize_sparsity([np.array([0, 255], np.uint8)], only_total_sparsity=True)
    assert sparsity.summarize_sparsity(sparsity.unpack_masks(state.masks, params))["w"] == 26 / 40


def test_a_packed_row_of_one_weight_is_a_byte_of_its_own():
    mask = np.array([[1], [0], [1]], np.uint8)
    params, state, _ = _state(packed=True, mask=mask)
    np.testing.assert_array_equal(state.masks["w"], [[128], [0], [128]])
    np.testing.assert_array_equal(sparsity.active_masks(params, state)["w"], mask)
    with pytest.raises(ValueError, match="a byte of 128"):
        sparsity.summarize_sparsity(state)


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_the_overlap_of_two_states_is_that_of_their_bits(packed):
    other = (np.arange(40).reshape(4, 10) % 2 == 0).astype(np.uint8)
    states = [_state(packed, mask)[1] for mask in (_MASK, other)]
    # Of the 14 multiples of three below 40, seven are even: 0, 6, ..., 36.
    assert sparsity.summarize_intersection(*states) == {
        "w": 7 / 14,
        "b": None,
        "_total_intersection": 0.5,
    }
    assert sparsity.summarize_intersection(*states[::-1])["w"] == 7 / 20
    jitted = jax.jit(sparsity.summarize_intersection)(*states)
    assert float(jitted["_total_intersection"]) == 0.5


def test_a_packed_state_and_a_plain_one_are_not_compared():
    packed, plain = _state(True)[1], _state(False)[1]
    with pytest.raises(ValueError, match=r"differ at w \(\(4, 2\), \(4, 10\)\)"):
        sparsity.summarize_intersection(packed, plain)


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_the_masks_in_use_are_those_that_were_given(packed):
    params, state, _ = _state(packed)
    masks = sparsity.active_masks(params, state)
    assert masks["w"].dtype == jnp.uint8
    np.testing.assert_array_equal(masks["w"], _MASK)
    assert masks["b"] is None
    jitted = jax.jit(sparsity.active_masks)(params, state)
    np.testing.assert_array_equal(jitted["w"], _MASK)


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_layers_are_summed_up_as_named_tuples(packed):
    params, state, trainer = _state(packed)
    pruned = trainer.post_gradient_update(params, state)
    rows = sparsity.reports.layer_summary(pruned, state, trainer)
    assert all(type(row) is sparsity.reports.LayerSummary for row in rows)
    bias, kernel = rows
    assert bias == ("b", (10,), "", None, 0.0, 0)
    assert kernel.path == "w"
    assert kernel.shape == (4, 10)
    assert kernel.type == "Unstructured"
    assert kernel.target == pytest.approx(26 / 40)
    assert kernel.achieved == 26 / 40
    assert kernel.mask_bytes == (8 if packed else 40)
    path, shape, kind, target, achieved, size = kernel
    assert (path, shape, kind, achieved, size) == kernel[:3] + kernel[4:]
    assert target == kernel.target
