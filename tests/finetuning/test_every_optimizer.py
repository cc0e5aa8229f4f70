"""Every public transformation of optax trains kept entries as among zeros, or is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests.transformations import PUBLIC, build

STEPS = 100
# fmt: off
REFUSED = {
    # Means and norms along axes, factored moments, matrices, flat vectors, histories.
    "adafactor", "adaptive_grad_clip", "centralize", "clip_by_block_rms", "flatten", "galore",
    "muon", "scale_by_galore", "scale_by_lbfgs", "scale_by_muon", "scale_by_param_block_rms",
    "scale_by_sm3", "sm3",
    # Noise that depends on the shape.
    "add_noise", "noisy_sgd",
    # Other arguments, gradients of examples, parameters of a class of their own.
    "differentially_private_aggregate", "dpsgd", "hutchinson_estimator_diag_hessian", "lbfgs",
    "lookahead", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch", "sophia",
    # No updates, or a state that changes its structure.
    "measure_with_ema", "monitor",
}
# fmt: on


def arrays(seed):
    draw = np.random.default_rng(seed).standard_normal
    return {"kernel": draw((6, 10)), "bias": draw(10)}


@functools.cache
def draw_masks():
    kernel = np.random.default_rng(0).random((6, 10)) < 0.3
    return {"kernel": kernel.astype(np.uint8), "bias": np.ones(10, np.uint8)}


def train(tx, params, takes_value):
    """Trains on a sum of squares, whose gradients are 0 where parameters and targets are."""
    targets, scales = ({x: y * draw_masks()[x] for x, y in arrays(seed).items()} for seed in (1, 2))

    def loss(params):
        terms = jax.tree.map(lambda p, t, s: jnp.sum(s * s * (p - t) ** 2), params, targets, scales)
        return terms["kernel"] + terms["bias"]

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        extra = {"value": value} if takes_value else {}
        updates, state = tx.update(grads, state, params, **extra)
        moved = optax.apply_updates(params, updates)
        return ({x: y * draw_masks()[x] for x, y in moved.items()}, state), None

    return jax.lax.scan(step, (params, tx.init(params)), length=STEPS)[0][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_it_trains_kept_entries_as_among_zeros_or_is_refused(name):
    with jax.enable_x64(True):
        params = {x: jnp.asarray(y * draw_masks()[x]) for x, y in arrays(3).items()}
        tx = optax.with_extra_args_support(build(name))
        if name.startswith("scale_by") and name not in REFUSED:
            tx = optax.chain(tx, optax.scale(-0.01))  # downhill
        kept = sparsity.train_only(tx, draw_masks())
        if name in REFUSED:
            with pytest.raises(ValueError, match="entry by entry"):
                kept.init(params)
            return
        train_both = jax.jit(lambda params: [train(x, params, name != "sam") for x in (tx, kept)])
        masked, trained = train_both(params)
        for path, mask in draw_masks().items():
            np.testing.assert_allclose(trained[path] * mask, masked[path] * mask, rtol=1e-7)
