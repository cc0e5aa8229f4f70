"""Updates of a smaller model are compared with those of the masked one, entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.comparisons.updates import check_updates


def compare(tx, params, size, model="small model"):
    """Compares updates of vectors whose first entries stay with those of the masked vectors."""
    return check_updates(
        tx,
        params,
        tx.init(params),
        mask=lambda path, array: array * (np.arange(array.size) < size),
        cut=lambda tree: jax.tree.map(lambda x: x[:size], tree),
        cut_state=lambda state: state,
        model=model,
        remedy="none",
    )


def test_an_update_that_is_zero_in_the_masked_model_alone_is_refused():
    # Not 0 for two entries, which remain of four; far from rounding.
    tx = optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: jnp.full_like(g, 1e-4 * (g.size == 2)), grads)
    )
    params = {"w": jnp.ones(4)}
    with pytest.raises(ValueError, match=r"'update/w' has 0\.0001 in place of 0 at"):
        compare(tx, params, 2)


@pytest.mark.parametrize(
    "reduce",
    [jnp.max, jnp.min, lambda g: jnp.any(g >= 0), lambda g: jnp.any(g <= 0)],
    ids=["max", "min", "any not negative", "any not positive"],
)
def test_updates_that_depend_on_zeros_among_gradients_of_one_sign_are_refused(reduce):
    tx = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g * reduce(g), grads))
    params = {"w": jnp.ones(40)}
    with pytest.raises(ValueError, match="'update/w'"):
        compare(tx, params, 20)


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_optimizer_that_fails_on_other_shapes_is_refused_with_what_it_says(error):
    def update(grads, state, params=None):
        if grads["w"].size < 40:
            raise error("forty entries")
        return grads, state

    tx = optax.GradientTransformation(lambda params: (), update)
    params = {"w": jnp.ones(40)}
    with pytest.raises(
        ValueError, match=r"train the tiny model .* or none\. It says: forty"
    ) as caught:
        compare(tx, params, 20, model="tiny model")
    assert isinstance(caught.value.__cause__, error)


def test_an_optimizer_whose_state_loses_a_leaf_on_smaller_arrays_is_refused():
    def update(grads, state, params=None):
        is_large = grads["w"].size == 40
        return jax.tree.map(jnp.ones_like, grads), {"one": jnp.float32(1)} if is_large else ()

    tx = optax.GradientTransformation(lambda params: {"one": jnp.float32(1)}, update)
    with pytest.raises(ValueError, match=r"train the tiny model .* 1 leaves in place of 2.* none"):
        compare(tx, {"w": jnp.ones(40)}, 20, model="tiny model")


def test_gradients_that_compare_have_both_signs_twice_and_then_one():
    seen = []

    def update(grads, state, params=None):
        jax.debug.callback(lambda g: seen.append(np.array(g)), grads["w"])
        is_late = state >= 5
        return jax.tree.map(lambda g: g * is_late, grads), state + 1

    tx = optax.GradientTransformation(lambda params: jnp.int32(0), update)
    params = {"w": jnp.ones(40)}
    largest = compare(tx, params, 20)
    jax.effects_barrier()
    assert largest == 0
    # Updates of 0 are no comparison: the sixth is the first of others.
    masked = [grads for grads in seen if grads.size == 40]
    assert len(masked) == 6
    assert not any(grads[20:].any() for grads in masked)
    assert [{*np.sign(grads[:20]).tolist()} for grads in masked] == [
        {-1, 1}, {-1, 1}, {1}, {-1}, {-1, 1}, {-1, 1}
    ]  # fmt: skip
    assert len({grads.tobytes() for grads in masked}) == 6


@pytest.mark.parametrize("cut", [sparsity.compact, sparsity.shrink])
def test_a_state_of_other_parameters_is_refused_by_its_paths(cut):
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    graph = sparsity.trace(
        lambda params, x: x @ params["w"] + params["b"], params, jnp.ones((2, 3))
    )
    masks, tx = {"w": jnp.ones((3, 4), jnp.uint8), "b": None}, optax.sgd(0.1, momentum=0.9)
    for other in ({"w": params["w"]}, params | {"c": params["b"]}):
        differing = sorted(params.keys() ^ other.keys())[0]
        paths = f"opt_state .* params: '0/trace/{differing}' differ"
        if cut is sparsity.shrink:  # which cuts the state before any update
            paths = f"No leaf of opt_state belongs .* '0/trace/{min(other)}' is an array"
        with pytest.raises(ValueError, match=paths):
            cut(graph, params, masks, tx.init(other), tx)
