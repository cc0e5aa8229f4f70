"""Names and states of jaxpruner: arguments are checked as everywhere, states convert."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.compat import jaxpruner

PARAMS = {"w": jnp.arange(1.0, 33.0).reshape(4, 8), "b": jnp.ones(8)}
MASK = np.arange(32).reshape(4, 8) % 3 == 0


class SparseState(NamedTuple):
    """jaxpruner's: four fields."""

    masks: Any
    inner_state: Any
    target_sparsities: Any
    count: Any


def old_state(packed):
    mask = jnp.packbits(MASK) if packed else jnp.asarray(MASK, jnp.uint8)
    return SparseState(
        {"w": mask, "b": None},
        optax.adam(0.1).init(PARAMS),
        {"w": jnp.float32(0.65), "b": None},
        jnp.int32(7),
    )


@pytest.mark.parametrize("form", ["namedtuple", "mapping", "tuple"])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_a_state_of_four_fields_goes_on_training(form, packed):
    old = old_state(packed)
    old = {"namedtuple": old, "mapping": old._asdict(), "tuple": tuple(old)}[form]
    state = jaxpruner.convert_state(old, PARAMS)
    assert type(state) is sparsity.SparseState
    np.testing.assert_array_equal(state.masks["w"], MASK)
    assert (state.masks["b"], state.algorithm_state, int(state.count)) == (None, None, 7)
    pruner = sparsity.StaticRandomSparse(sparsity_distribution_fn=sparsity.Uniform(0.65))
    tx = pruner.wrap_optax(optax.adam(0.1))
    updates, state = jax.jit(tx.update)(PARAMS, state, PARAMS)
    new = optax.apply_updates(PARAMS, updates)
    np.testing.assert_array_equal(np.asarray(new["w"]) != 0, MASK)
    assert int(state.count) == 8


@pytest.mark.parametrize("state", [(1, 2, 3), {"masks": None}, optax.EmptyState(), 3])
def test_what_is_no_such_state_is_refused(state):
    with pytest.raises(ValueError, match=r"fields masks, inner_state, target_sparsities, count"):
        jaxpruner.convert_state(state, PARAMS)


def test_a_mask_of_another_model_is_named():
    state = old_state(packed=False)._replace(masks={"w": jnp.ones((3, 3), jnp.uint8), "b": None})
    with pytest.raises(ValueError, match=r"mask of 'w'.*shape \(3, 3\)"):
        jaxpruner.convert_state(state, PARAMS)


@pytest.mark.parametrize("kind", ["banana", None, 3, sparsity.NByM, dict])
def test_what_is_no_type_is_refused_when_its_function_is_asked_for(kind):
    with pytest.raises(ValueError, match=r"sparsity_type must be an instance such as"):
        jaxpruner.get_topk_fn(kind)


@pytest.mark.parametrize(
    "call",
    [
        lambda scores: jaxpruner.get_topk_fn(sparsity.NByM(2, 4, axis=5))(scores, 0.5),
        lambda scores: jaxpruner.get_topk_fn(sparsity.NByM(2, 3))(scores, 0.5),
        lambda scores: jaxpruner.topk_mask_calculator(scores, 1.5),
        lambda scores: jaxpruner.topk_block_mask_calculator(scores, 0.5, 0, 2, True),
    ],
    ids=["axis", "size", "sparsity", "block"],
)
def test_what_does_not_fit_the_scores_is_refused(call):
    with pytest.raises(ValueError, match=r"axis 5|does not divide|1\.5|must be"):
        call(jnp.ones((4, 8)))


def test_classes_that_need_no_arguments_serve_as_types():
    mask = jaxpruner.get_topk_fn(sparsity.Unstructured)(PARAMS["w"], 0.5)
    assert mask.sum() == 16
    assert sparsity.utils is sparsity.mask_calculator is jaxpruner
