"""Kept values train as the masked model does, in less memory, with any entrywise optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optax.contrib import schedule_free_adamw

import sparsity
from sparsity import compact, trace
from tests.compacting.models import masked
from tests.helpers import slow_but

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "amsgrad": optax.amsgrad(0.01),
    "lion": optax.lion(0.01),
    "rmsprop": optax.rmsprop(0.01, momentum=0.9),
    "adagrad": optax.adagrad(0.01),
    "adabelief": optax.adabelief(0.01),
    "radam": optax.radam(0.01),
    "schedule_free": schedule_free_adamw(0.01),
    "MultiSteps": optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "chain, ema": optax.chain(optax.clip(1.0), optax.ema(0.9), optax.scale(-0.1)),
    "masked": optax.masked(optax.adam(0.01), {"w": True, "layers": False, "b": True}),
    "partition": optax.partition(
        {"a": optax.adam(0.01), "b": optax.sgd(0.1)}, {"w": "a", "layers": "b", "b": "a"}
    ),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
}


def draw(seed=0):
    """(function, params with zeros outside masks, masks, input, graph)."""
    rng = np.random.default_rng(seed)
    masks = {
        "w": (rng.random((6, 10)) < 0.4).astype(np.uint8),
        "layers": np.stack([rng.permutation(100).reshape(10, 10) < 30 for _ in range(3)]).astype(
            "u1"
        ),
        "b": None,
    }
    params = {
        "w": jnp.asarray(rng.normal(size=(6, 10)) * masks["w"], jnp.float32),
        "layers": jnp.asarray(rng.normal(size=(3, 10, 10)) * masks["layers"], jnp.float32) / 3,
        "b": jnp.zeros(10),
    }

    def fn(params, x):
        h = x @ params["w"] + params["b"]
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])[0]

    x = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)
    return fn, params, masks, x, trace(fn, params, x)


@functools.cache
def gradients(step):
    """Gradients of `draw`, 0 outside the masks."""
    _, params, masks, _, _ = draw()
    rng = np.random.default_rng(step)
    drawn = {name: rng.normal(size=w.shape).astype(np.float32) for name, w in params.items()}
    return {n: g if masks[n] is None else g * masks[n] for n, g in drawn.items()}


@pytest.mark.parametrize("name", slow_but(["adam", "inject"], OPTIMIZERS))
def test_a_masked_run_goes_on_bit_for_bit(name):
    """Moves three steps of a masked run, then compares twenty of both."""
    tx, (_, params, masks, _, graph) = OPTIMIZERS[name], draw()
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(3):
        updates, state = update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    # Decay and averages leave zeros at 0, so that the masked run needs no wrapper here.
    model = compact(graph, params, masks, state, tx)
    values, kept_state = model.params, model.opt_state
    for step in range(3, 23):
        updates, state = update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
        grads = compact(graph, gradients(step), masks).params
        updates, kept_state = update(grads, kept_state, values)
        values = optax.apply_updates(values, updates)
    equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    equal(model.dense(values), params)
    # Outside the masks some optimizers have moments other than 0.
    equal(compact(graph, params, masks, state).opt_state, kept_state)
    equal(compact(graph, params, masks, model.dense_state(kept_state)).opt_state, kept_state)


def test_the_state_of_a_wrapped_optimizer_goes_on_without_the_wrapper():
    fn, params, masks, x, graph = draw()
    pruner = sparsity.StaticRandomSparse(batch_axes=lambda path, param: param.ndim // 3)
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    wrapped = pruner.wrap_optax(inner, masks=masks)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(apply, tx, params, state):
        grads = jax.grad(lambda params: (apply(params, x) ** 2).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = wrapped.init(params)
    for _ in range(3):
        params, state = step(fn, wrapped, params, state)
    model = compact(graph, params, masks, state, inner)
    values, kept_state = model.params, model.opt_state
    assert {leaf.shape for leaf in jax.tree.leaves(kept_state) if leaf.ndim} == {
        values[name].shape for name in values
    }
    for _ in range(20):
        params, state = step(fn, wrapped, params, state)
        values, kept_state = step(model.apply, inner, values, kept_state)
    dense = model.dense(values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), dense, params)


def test_one_number_for_a_parameter_stays_in_the_state():
    def init(params):
        numbers = jax.tree.map(lambda _: jnp.zeros(()), params)
        return numbers, jax.tree.map(lambda x: x[None], numbers)

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda x: x + 1, state)

    _, params, masks, _, graph = draw()
    tx = optax.GradientTransformation(init, update)
    model = compact(graph, params, masks, tx.init(params), tx)
    shapes = [{x.shape for x in jax.tree.leaves(state)} for state in model.opt_state]
    assert shapes == [{()}, {(1,)}]


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.adafactor(0.01, min_dim_size_to_factor=4),
            r"holds no moment for each entry.*tx\.init\(model\.params\)",
        ),
        (
            optax.contrib.muon(0.01),
            "^Leave out tx.* entry by entry: it fails on arrays of other shapes",
        ),
        (
            optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
            "^Leave out tx.* entry by entry: div in clip_by_block_rms reads a number",
        ),
    ],
)
def test_optimizers_that_read_more_than_single_entries_are_refused(tx, message):
    _, params, masks, _, graph = draw()
    with pytest.raises(ValueError, match=message):
        compact(graph, params, masks, tx.init(params), tx)


@pytest.mark.parametrize(("scanned", "limits"), [(True, (4.2, 3.2)), (False, (3.2, 3.2))])
def test_a_step_of_adam_holds_one_dense_layer_at_a_time(scanned, limits):
    """Arguments and temporaries of a donated step, in bytes for each dense weight."""
    size, layers = 256, 8
    rng = np.random.default_rng(0)
    mask = np.zeros((layers, size * size), np.uint8)
    for row in mask:
        row[rng.permutation(size * size)[: size * size // 10]] = 1
    masks = {f"layer{i}": row.reshape(size, size) for i, row in enumerate(mask)}
    if scanned:
        masks = {"layers": mask.reshape(layers, size, size)}
    params = {name: jnp.asarray(each, jnp.float32) for name, each in masks.items()}

    def layer(h, w):
        return jax.nn.relu(h @ w) + h, None

    def fn(params, x):
        if scanned:
            return jax.lax.scan(layer, x, params["layers"])[0]
        for w in params.values():
            x = layer(x, w)[0]
        return x

    x = jnp.ones((4, size))
    model = compact(trace(fn, params, x), params, masks)
    tx = optax.adam(0.01)

    def step(params, state, model, x):
        grads = jax.grad(lambda params: (model.apply(params, x) ** 2).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(
        model.params, tx.init(model.params), model, x
    )
    memory = compiled.compile().memory_analysis()
    weights = layers * size * size
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert total / weights < limits[not scanned]


def test_moved_masks_compile_nothing_anew():
    fn, params, _, x, graph = masked("scanned")
    count = 0

    @jax.jit
    def loss(model, values):
        nonlocal count
        count += 1
        return (model.apply(values, x) ** 2).sum()

    for seed in range(2):
        rng = np.random.default_rng(seed)
        mask = np.stack([rng.permutation(144).reshape(12, 12) < 50 for _ in range(3)])
        model = compact(graph, [params[0] * mask], [mask.astype(np.uint8)])
        expected = (fn([params[0] * mask], x) ** 2).sum()
        np.testing.assert_allclose(loss(model, model.params), expected, rtol=1e-5)
    assert count == 1


@pytest.mark.slow
def test_a_compact_state_of_a_wrapped_optimizer_goes_on():
    _, params, masks, _, graph = draw()
    pruner = sparsity.StaticRandomSparse(
        batch_axes=lambda path, param: param.ndim // 3, use_compact_state=True
    )
    wrapped = pruner.wrap_optax(optax.adam(0.01), masks=masks)
    state = wrapped.init(params)
    _, state = jax.jit(wrapped.update)(gradients(0), state, params)
    _, expected = optax.adam(0.01).update(gradients(0), optax.adam(0.01).init(params), params)
    model = compact(graph, params, masks, state)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        model.opt_state,
        compact(graph, params, masks, expected).opt_state,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_axes": 1, "use_packed_masks": True},
        {"sparsity_type": sparsity.NByM(2, 4), "batch_axes": 1},
    ],
)
def test_slots_of_a_compact_state_go_to_those_of_the_kept_values(options):
    rng = np.random.default_rng(0)
    params, grads = ({"w": jnp.asarray(rng.normal(size=(4, 4, 8)), jnp.float32)} for _ in range(2))
    x = jnp.ones((4, 3, 4))

    def fn(params, x):  # experts along axis 1, so that kept values are [expert, ...]
        return jnp.einsum("ebi,ieo->ebo", x, params["w"])

    tx = optax.chain(optax.clip(1.0), optax.adam(0.01))
    graph, opt_states = trace(fn, params, x), []
    for use_compact_state in (False, True):
        pruner = sparsity.StaticRandomSparse(
            sparsity_distribution_fn=sparsity.Uniform(0.5),
            use_compact_state=use_compact_state,
            **options,
        )
        wrapped = pruner.wrap_optax(tx)
        updates, state = jax.jit(wrapped.update)(grads, wrapped.init(params), params)
        packed = "use_packed_masks" in options
        masks = sparsity.unpack_masks(state.masks, params) if packed else state.masks
        model = compact(graph, optax.apply_updates(params, updates), masks, state, tx)
        opt_states.append(model.opt_state)
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(equal, *opt_states)


def test_a_model_without_dead_channels_is_compact():
    rng = np.random.default_rng(0)
    shapes = {"up": (12, 40), "down": (40, 6)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    masks = {name: (rng.random(shape) < 0.06).astype(np.uint8) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(5, 12)))

    def fn(params, x):
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    small = sparsity.shrink(trace(fn, params, x), params, masks)
    assert small.params["up"].shape[1] < 40
    model = compact(small.graph, small.params, small.masks)
    expected = fn(jax.tree.map(jnp.multiply, params, masks), x)
    np.testing.assert_allclose(model.apply(model.params, x), expected, rtol=1e-5, atol=1e-6)
    kept = sum(values.size for values in jax.tree.leaves(model.params))
    assert kept < sum(int(mask.sum()) for mask in masks.values())


def test_values_and_positions_are_saved_and_restored(tmp_path):
    fn, params, masks, x, graph = draw()
    model = compact(graph, params, masks)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "step", {"model": model, "params": model.params})
    checkpointer.wait_until_finished()
    flipped = {name: None if m is None else m[..., ::-1, ::-1] for name, m in masks.items()}
    empty = compact(graph, jax.eval_shape(lambda: params), flipped)
    restored = checkpointer.restore(tmp_path / "step", {"model": empty, "params": empty.params})
    y = jax.jit(lambda model, params: model.apply(params, x))(**restored)
    np.testing.assert_array_equal(y, jax.jit(fn)(params, x))
    # What came out of a checkpoint or a compiled function has no `params` of its own.
    state = optax.adam(0.1).init(restored["params"])
    moments = restored["model"].dense_state(state)[0].mu
    assert jax.tree.map(jnp.shape, moments) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("holds_rows", [False, True])
def test_moments_of_other_parameters_or_of_rows_have_no_dense_state(holds_rows):
    params, x = {"w": jnp.arange(1.0, 13.0).reshape(2, 2, 3)}, jnp.ones((4, 2))
    mask = jnp.array([[[1, 1, 0], [0, 0, 1]]] * 2, jnp.uint8)
    graph = sparsity.trace(
        lambda p, x: jax.lax.scan(lambda h, w: (h @ w @ w.T, None), x, p["w"])[0], params, x
    )
    model = sparsity.compact(graph, params, {"w": mask})
    if holds_rows:
        state = optax.adafactor(0.1, min_dim_size_to_factor=2).init(model.params)
    else:
        state = optax.adam(0.1).init(params)
    with pytest.raises(ValueError, match=r"leaf of shape .* for 'w', whose kept values have"):
        model.dense_state(state)


@pytest.mark.parametrize("is_sparse_gradients", [False, True])
def test_norms_of_gradients_need_masked_gradients_in_the_wrapped_run(is_sparse_gradients):
    params = {"w": jnp.arange(1.0, 13.0).reshape(3, 4)}
    graph = trace(lambda params, x: x @ params["w"], params, jnp.ones((2, 3)))
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
        is_sparse_gradients=is_sparse_gradients,
    )
    tx = updater.wrap_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    _, state = tx.update(params, tx.init(params), params)
    masks = state.masks
    if is_sparse_gradients:
        assert compact(graph, params, masks, state, tx).tx is tx.inner
    else:
        with pytest.raises(ValueError, match=r"of 'w' in clip_by_global_norm returns another"):
            compact(graph, params, masks, state, tx)
