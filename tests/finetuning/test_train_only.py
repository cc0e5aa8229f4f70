"""`train_only` trains chosen entries as the dense optimizer does, and touches no other bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from sparsity.finetuning.train_only import train_only
from sparsity.training.state import SparseState
from tests import eight_devices
from tests.helpers import ON_CPU

SHAPES = {"kernel": (6, 8), "layers": (2, 4, 6), "bias": (8,), "scale": (5,)}
MASKED = ("kernel", "layers", "bias")  # all entries of the bias; the scale is frozen
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "lion": lambda: optax.lion(0.1),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0, 9)),
}
REFUSED = {
    "adafactor": lambda: optax.adafactor(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
    "means over parameters": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
}


def arrays(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def draw_masks():
    rng = np.random.default_rng(99)
    masks = {name: (rng.random(SHAPES[name]) < 0.3).astype(np.uint8) for name in MASKED}
    return masks | {"bias": np.ones(SHAPES["bias"], np.uint8)}


def train(tx, steps=4, params=None):
    params = jax.tree.map(jnp.asarray, arrays(0) if params is None else params)
    state, update = tx.init(params), jax.jit(tx.update, donate_argnums=1)
    for step in range(steps):
        updates, state = update(arrays(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def check_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        x, y = (np.atleast_1d(np.asarray(leaf)).view(np.uint8) for leaf in (x, y))
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_dense_optimizer_restricted_to_the_masks(name):
    masks = draw_masks() | {"scale": np.zeros(SHAPES["scale"], np.uint8)}
    trained, _ = train(train_only(OPTIMIZERS[name](), masks))
    # The oracle: a dense optimizer to which all other entries are zeros.
    dense, tx = jax.tree.map(np.multiply, arrays(0), masks), OPTIMIZERS[name]()
    state = tx.init(dense)
    for step in range(4):
        grads = jax.tree.map(np.multiply, arrays(step + 1), masks)
        updates, state = tx.update(grads, state, dense)
        dense = optax.apply_updates(dense, updates)
    for path, start in arrays(0).items():
        kept = masks[path] > 0
        np.testing.assert_allclose(trained[path][kept], dense[path][kept], rtol=2e-5, atol=1e-6)
        assert not kept.any() or (trained[path] != start)[kept].all()
        check_bits(trained[path][~kept], start[~kept])


def test_adamw_with_clipping_follows_the_equations_on_chosen_entries():
    masks, params = draw_masks(), arrays(0, np.float64)
    chosen = {name: np.flatnonzero(mask) for name, mask in masks.items()}
    mu, nu = ({name: np.zeros(len(at)) for name, at in chosen.items()} for _ in range(2))
    for step in range(1, 5):
        grads = {name: arrays(step)[name].ravel()[at] for name, at in chosen.items()}
        norm = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in grads.values()))
        for name, at in chosen.items():
            grad = grads[name] * min(1, 0.5 / norm)
            mu[name] = 0.9 * mu[name] + 0.1 * grad
            nu[name] = 0.999 * nu[name] + 0.001 * grad**2
            corrected = mu[name] / (1 - 0.9**step), nu[name] / (1 - 0.999**step)
            weights = params[name].reshape(-1)
            update = corrected[0] / (np.sqrt(corrected[1]) + 1e-8) + 1e-4 * weights[at]
            weights[at] -= 0.1 * update
    trained, state = train(train_only(OPTIMIZERS["adamw"](), masks))
    for name in MASKED:
        np.testing.assert_allclose(trained[name], params[name], rtol=1e-4, atol=1e-5)
    moments = state.state[1][0].mu
    np.testing.assert_allclose(moments["kernel"], mu["kernel"], rtol=1e-4, atol=1e-6)
    shapes = {"kernel": len(chosen["kernel"]), "layers": len(chosen["layers"]), "bias": 8}
    assert {name: (size,) for name, size in shapes.items()} == {
        name: moments[name].shape for name in MASKED
    }
    assert moments["scale"] == optax.MaskedNode()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@ON_CPU  # GPUs write one NaN for every NaN
def test_other_entries_keep_their_bits_whatever_numbers_they_are(dtype):
    odd = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-5, 3e4]
    values = np.array(odd) * (complex(1, 1) if dtype == "complex64" else 1)
    if dtype == "complex64":
        values[1] = complex(-0.0, -0.0)
    frozen = jnp.asarray(values, dtype)
    params = {"w": jnp.stack([frozen, jnp.ones(8, dtype)]), "frozen": frozen}
    tx = train_only(optax.adamw(0.1, weight_decay=0.5), {"w": np.array([[0] * 8, [1] * 8])})

    @jax.jit
    def step(params, state):
        updates, state = tx.update(params, state, params)  # some gradients are not finite
        return optax.apply_updates(params, updates), state

    trained, state = params, tx.init(params)
    for _ in range(2):
        trained, state = step(trained, state)
    check_bits(trained["w"][0], params["w"][0])
    check_bits(trained["frozen"], params["frozen"])
    assert (trained["w"][1] != params["w"][1]).all()
    assert trained["w"].dtype == dtype


def test_leaves_of_no_numbers_integers_and_missing_gradients_are_frozen():
    params = {"w": jnp.ones(4), "ids": jnp.arange(3), "name": None, "extra": (jnp.ones(2),)}
    tx = train_only(optax.adam(0.1), {"w": np.array([1, 0, 0, 1], bool)})

    def loss(params):
        return (params["w"] * params["ids"][1]).sum() + params["extra"][0].sum()

    grads = jax.grad(loss, allow_int=True)(params)
    assert grads["ids"].dtype == jax.dtypes.float0
    updates, _ = tx.update(grads, tx.init(params), params)
    trained = optax.apply_updates(params, updates)
    check_bits(trained | {"w": None}, params | {"w": None})
    np.testing.assert_allclose(trained["w"], [0.9, 1, 1, 0.9], rtol=1e-5)
    # Gradients of the trained part alone, as equinox and nnx give them.
    updates, _ = tx.update({**grads, "ids": None, "extra": (None,)}, tx.init(params), params)
    assert updates["ids"] is None
    assert updates["extra"] == (None,)


def test_updates_run_under_scan_vmap_and_within_other_transformations():
    masks = draw_masks()
    tx = optax.inject_hyperparams(lambda rate: train_only(optax.adam(rate), masks))(0.1)
    tx = optax.chain(optax.clip(0.5), tx)

    def run(params, scales):
        def step(carry, scale):
            params, state = carry
            updates, state = tx.update(jax.tree.map(lambda x: x * scale, params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), scales)[0][0]

    two = jax.tree.map(lambda *x: jnp.stack(x), arrays(0), arrays(1))
    scales = jnp.array([[1.0, 0.5, -1.0], [2.0, 1.0, 3.0]])
    mapped = jax.jit(jax.vmap(run))(two, scales)
    alone = jax.jit(run)(arrays(1), scales[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-5), mapped, alone)
    frozen = np.asarray(masks["kernel"]) == 0
    check_bits(mapped["kernel"][1][frozen], arrays(1)["kernel"][frozen])


def test_the_state_is_abstract_donated_and_restored_from_a_checkpoint(tmp_path):
    tx = train_only(optax.adamw(0.1), draw_masks())
    params, state = train(tx, steps=2)
    shapes = jax.eval_shape(tx.init, arrays(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", (params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "run", (params, shapes))
    update = jax.jit(tx.update)
    check_bits(update(arrays(9), restored[1], restored[0]), update(arrays(9), state, params))


def test_extra_arguments_reach_the_optimizer():
    tx = train_only(optax.contrib.reduce_on_plateau(patience=1), draw_masks())
    params = arrays(0)
    _, state = tx.update(arrays(1), tx.init(params), params, value=jnp.float32(2.0))
    assert state.state.best_value == 2.0
    tx = train_only(optax.sgd(0.1), draw_masks())
    tx.update(arrays(1), tx.init(params))  # sgd reads no parameters
    tx = train_only(optax.adamw(0.1), draw_masks())
    with pytest.raises(ValueError, match="params"):
        tx.update(arrays(1), tx.init(params))


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_read_more_than_entries_are_refused(name):
    with pytest.raises(ValueError, match=r"train_only.*entry by entry"):
        train_only(REFUSED[name](), draw_masks()).init(arrays(0))


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"w": np.ones((2, 9))}, r"'w' has the shape \(2, 9\).*\(2, 8\)"),
        ({"w": np.array([[255], [1]], np.uint8)}, r"'w'.*255.*unpack_masks"),
        ({"w": np.ones((2, 1), np.uint8)}, r"'w'.*\(2, 1\).*unpack_masks"),
        ({"v": np.ones((2, 8))}, "no leaf at 'v'"),
        ({"ids": np.ones(3)}, "'ids'.*int32"),
        ({"rate": np.ones(())}, "'rate'.*no floating array but of <class 'float'>"),
        ({"w": np.zeros((2, 8))}, "keep no entry"),
        (None, "keep no entry"),
    ],
)
def test_masks_of_other_parameters_are_errors_that_name_them(masks, message):
    params = {"w": jnp.ones((2, 8)), "ids": jnp.arange(3), "rate": 0.1}
    with pytest.raises(ValueError, match=message):
        train_only(optax.sgd(0.1), masks).init(params)


def test_gradients_of_another_model_traced_masks_and_other_optimizers_are_errors():
    tx = train_only(optax.sgd(0.1), {"w": np.ones(3)})
    with pytest.raises(ValueError, match="gradients have no leaf at 'w'"):
        tx.update({"v": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}))
    with pytest.raises(ValueError, match=r"masks\['w'\] has no values.*outside of jit"):
        jax.jit(lambda mask: train_only(optax.sgd(0.1), {"w": mask}).init(mask))(jnp.ones(3))
    with pytest.raises(ValueError, match="got the state of an optimizer"):
        train_only(optax.sgd(0.1), (SparseState({"w": np.ones(3)}),))
    with pytest.raises(ValueError, match="GradientTransformation"):
        train_only("adam", {"w": np.ones(3)})


def test_the_state_of_another_optimizer_or_of_other_masks_is_refused():
    params = {"w": jnp.ones((3, 4))}
    tx, wider, complete = (
        train_only(optax.sgd(0.1), {"w": mask})
        for mask in (np.eye(3, 4), np.tri(3, 4), np.ones((3, 4)))
    )
    with pytest.raises(ValueError, match="state must be the state that init of train_only returns"):
        tx.update(params, optax.adam(0.1).init(params), params)
    for one, other in ((tx, wider), (tx, complete), (complete, tx)):
        with pytest.raises(ValueError, match=r"The state of 'w' was made with other masks"):
            one.update(params, other.init(params), params)


def test_a_step_needs_no_second_dense_array_beside_the_gradient():
    params = {name: jnp.ones((256, 256)) for name in "abcd"}
    mask = np.zeros((256, 256), np.uint8)
    mask[:, ::100] = 1
    tx = train_only(optax.adam(0.1), dict.fromkeys(params, mask))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        grads = jax.grad(lambda params: sum(((x @ w) ** 2).sum() for w in params.values()))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = step.lower(params, tx.init(params), jnp.ones((1, 256))).compile()
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries / (4 * 4 * 256**2) < 1.2


@pytest.mark.slow
@eight_devices.KINDS
def test_parameters_that_devices_share_along_any_axes(kind):
    eight_devices.run("finetuning", kind)
