"""Optimizers whose updates depend on removed entries, or on entries of other parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest

from sparsity.programs.optimizers import Removed, check_entrywise

DENSE = {"a": (4, 5), "b": (4, 5), "c": (3,)}
KEPT = {"a": (7,), "b": (7,), "c": (3,)}


def check(tx, dtype=jnp.float32, are_zero=True, kept=KEPT, **options):
    dense, remaining = (
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        for shapes in (DENSE, kept)
    )
    removed = [Removed(are_zero, have_gradients=False)]
    check_entrywise(tx, dense, remaining, removed, remedy="Stop", claim="It differs.", **options)


def each(fn):
    """An optimizer that maps the gradient of each parameter, and the parameter."""
    return optax.stateless(lambda grads, params: jax.tree.map(fn, grads, params))


def joined(fn):
    """An optimizer that maps all gradients at once."""
    return optax.stateless(lambda grads, _: fn(grads))


def remember(start, read):
    """An optimizer that adds squares to a state, and reads the state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.full_like(p, start), params),
        lambda grads, state, params=None: (
            jax.tree.map(read, grads, state),
            jax.tree.map(lambda s, g: s + g * g, state, grads),
        ),
    )


def listed(params):
    return jax.tree.leaves(jax.tree.map(jnp.zeros_like, params))


def exchange(grads, state, params=None):
    return state, grads | {"a": grads["b"], "b": grads["a"]}


# A removed entry is 0: the name of the reduction that a 0 changes.
READ_REMOVED = {
    "a minimum of magnitudes": (each(lambda g, p: g * jnp.min(jnp.abs(g))), "reduce_min"),
    "a maximum": (each(lambda g, p: g * jnp.max(g)), "reduce_max"),
    "a sum of exponentials": (each(lambda g, p: g / jnp.sum(jnp.exp(g))), "reduce_sum"),
    "a number of zeros": (each(lambda g, p: g * jnp.sum(g == 0)), "reduce_sum"),
    "a number of entries": (each(lambda g, p: g / jnp.sum(jnp.ones_like(g))), "reduce_sum"),
    "a product": (each(lambda g, p: g * jnp.prod(g)), "reduce_prod"),
    "whether all are not 0": (each(lambda g, p: jnp.where(jnp.all(g != 0), g, p)), "reduce_and"),
    "whether any is 0": (each(lambda g, p: jnp.where(jnp.any(p == 0), g, p)), "reduce_or"),
    "a sum of sums that start at 1": (remember(1.0, lambda g, s: g / jnp.sum(s)), "reduce_sum"),
    "a sum in a later step": (
        optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda grads, state, params=None: (
                jax.tree.map(lambda g, s: g / (1 + jnp.sum(s)), grads, state),
                jax.tree.map(lambda s: s + 1, state),
            ),
        ),
        "reduce_sum",
    ),
    "a sum in a branch": (
        each(lambda g, p: jax.lax.cond(jnp.sum(p) > 0, lambda: g / jnp.sum(g + 1), lambda: g)),
        "reduce_sum",
    ),
}


@pytest.mark.parametrize("name", READ_REMOVED)
def test_reductions_that_removed_entries_change_are_refused(name):
    tx, reduction = READ_REMOVED[name]
    message = rf"{reduction}( of 'a')?( in \w+)? returns another number without the removed entries"
    with pytest.raises(ValueError, match=message):
        check(tx)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (joined(lambda g: g | {"a": (g["a"] + g["b"]) / 2}), "entries of 'a' and 'b' meet"),
        (joined(lambda g: g | {"a": g["b"], "b": g["a"]}), "one parameter train another"),
        (
            optax.GradientTransformation(
                lambda params: jax.tree.map(jnp.zeros_like, params), exchange
            ),
            "entries of 'a' and 'b' meet",
        ),
    ],
    ids=["sum", "exchange", "exchange in the state"],
)
def test_entries_of_two_parameters_never_meet(tx, message):
    with pytest.raises(ValueError, match=message):
        check(tx)


ACCEPTED = {
    "a sum of squares": each(lambda g, p: g / jnp.sum(g * g) * jnp.sum(jnp.square(p))),
    "a number of nonzero entries": each(lambda g, p: g / jnp.sum(g != 0)),
    "whether all are finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "the norm of another parameter": joined(lambda g: g | {"a": g["a"] * jnp.sum(g["b"] ** 2)}),
    "a norm of steps of Adam": optax.chain(
        optax.scale_by_adam(), optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1)
    ),
    "a norm after several steps": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), 2
    ).gradient_transformation(),
    "a Python number in the state": optax.GradientTransformation(
        lambda params: (jax.tree.map(jnp.zeros_like, params), 1.0),
        lambda grads, state, params=None: (grads, (grads, state[1] * jnp.sum(grads["a"]))),
    ),
    "moments in a list": optax.GradientTransformation(
        listed,
        lambda grads, state, params=None: (
            jax.tree.unflatten(jax.tree.structure(grads), state),
            [s + g for s, g in zip(state, jax.tree.leaves(grads), strict=True)],
        ),
    ),
    "a sum of squares of all steps": remember(0.0, lambda g, s: g / jnp.sqrt(jnp.sum(s))),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in ACCEPTED for dtype in (jnp.float32, jnp.bfloat16)),
        # `MultiSteps` casts complex steps to real ones.
        *((name, jnp.complex64) for name in ACCEPTED if name != "a norm after several steps"),
    ],
)
def test_norms_of_kept_entries_are_accepted(name, dtype):
    check(ACCEPTED[name], dtype)


def test_a_product_of_ones_at_removed_entries_is_accepted():
    check(each(lambda g, p: g * jnp.prod(1 + g)))


# The full parameter has moments of entries that an update of the masks removes.
@pytest.mark.parametrize("name", ["a norm of steps of Adam", "a sum of squares of all steps"])
def test_norms_of_moments_are_refused_where_masks_move(name):
    with pytest.raises(
        ValueError, match=r"reduce_sum of .* returns another number without the removed"
    ):
        check(ACCEPTED[name], masks_move=True)


def test_moments_without_the_paths_of_parameters_are_refused_where_masks_move():
    with pytest.raises(ValueError, match="one parameter train another"):
        check(ACCEPTED["moments in a list"], masks_move=True)


def test_norms_of_gradients_are_accepted_where_masks_move():
    check(ACCEPTED["a sum of squares"], masks_move=True)


def test_norms_of_parameters_are_refused_where_removed_entries_may_not_be_zero_yet():
    tx = each(lambda g, p: g / jnp.sum(p * p))
    check(tx)
    with pytest.raises(
        ValueError, match=r"reduce_sum of .* returns another number without the removed"
    ):
        check(tx, are_zero=False)
    check(each(lambda g, p: g / jnp.sum(g * g) + 0.1 * p), are_zero=False)
