"""Masks of compact models move as SET and RigL move them, in arrays of unchanged shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import FanIn, NByM, Unstructured, compact, trace
from tests.helpers import checking_leaks

ADAM = optax.adam(0.01)
SRIGL = functools.partial(sparsity.SRigL, min_salient=None)
PATTERNS = [Unstructured(), FanIn(1), FanIn(4), NByM(1, 4, -2)]


def layers_first(path, param):
    return int(param.ndim == 3)


def make_pruner(kind, pattern=None, **fields):
    fields = {
        "scheduler": sparsity.PeriodicSchedule(10, 0),
        "sparsity_distribution_fn": sparsity.Uniform(0.75),
        "sparsity_type": Unstructured() if pattern is None else pattern,
        "batch_axes": layers_first,
    } | fields
    return kind(**fields)


def model_fn(params, x):
    """A stack of layers, and an embedding that is read twice."""
    h = jnp.tanh(x @ params["embedding"] + params["b"])
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])[0]
    return h @ params["embedding"].T


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "embedding": jax.random.normal(keys[0], (8, 16)),
        "layers": jax.random.normal(keys[1], (3, 16, 16)) / 3,
        "b": jnp.zeros(16),
    }
    return jax.tree.map(lambda x: x.astype(dtype), params)


def make_inputs(count=4):
    return jax.random.normal(jax.random.key(1), (2, count, 8))


def loss_fn(apply, params, x, y):
    decay = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    return jnp.mean(jnp.square(apply(params, x) - y)) + 0.01 * decay


def start(pruner, dtype=jnp.float32, tx=ADAM, **options):
    """(masked parameters, state of the wrapped optimizer, compact model), after one step."""
    params = make_params(dtype)
    wrapped = pruner.wrap_optax(tx)
    state = wrapped.init(params)
    params = pruner.post_gradient_update(params, state)
    grads = jax.tree.map(lambda p: jnp.sin(7 * p) * (p != 0), params)
    state = state._replace(inner_state=tx.update(grads, state.inner_state, params)[1])
    graph = trace(model_fn, params, make_inputs()[0].astype(dtype))
    return params, state, compact(graph, params, state.masks, state, **options)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def moments_under(state, masks):
    """The moments of Adam under masks, as numbers."""
    return [
        {
            name: np.asarray(m if masks[name] is None else m * masks[name])
            for name, m in each.items()
        }
        for each in (state.mu, state.nu)
    ]


# Each pair of a kind, a pattern and a dtype is in one of them.
MOVES = [
    (kind, pattern, (jnp.float32, jnp.bfloat16)[(row + column) % 2])
    for row, kind in enumerate((sparsity.SET, sparsity.RigL, SRIGL, SRIGL))
    for column, pattern in enumerate(PATTERNS[:1] if kind is SRIGL else PATTERNS)
]


@pytest.mark.parametrize(
    ("kind", "pattern", "dtype"),
    [pytest.param(*move, marks=[] if i == 5 else pytest.mark.slow) for i, move in enumerate(MOVES)],
)
def test_masks_values_and_moments_are_those_of_the_wrapped_updater(kind, pattern, dtype):
    pruner = make_pruner(kind, pattern)
    params, state, model = start(pruner, dtype)
    x, y = make_inputs().astype(dtype)
    wrapped = pruner.wrap_optax(ADAM)

    @jax.jit
    def move_masked(params, state, count):
        grads = jax.grad(functools.partial(loss_fn, model_fn))(params, x, y)
        updates, state = wrapped.update(grads, state._replace(count=count), params)
        return pruner.post_gradient_update(optax.apply_updates(params, updates), state), state

    @jax.jit
    def move(model, params, state, count, x, y):
        loss = functools.partial(loss_fn, x=x, y=y)
        return model.move(pruner, params, state, count, loss)

    first, values, moments = state.masks, model.params, model.opt_state
    for count in (0, 10, 20):
        params, state = move_masked(params, state, count)
        model, values, moments = move(model, values, moments, count, x, y)
        assert_equal(model.masks, state.masks)
        assert_equal(model.dense(values), params)
        assert_equal(
            moments_under(model.dense_state(moments)[0], state.masks),
            moments_under(state.inner_state[0], state.masks),
        )
    assert (state.masks["layers"] != first["layers"]).any()
    assert moments[0].count == 1


def test_a_mask_of_the_user_moves_where_the_distribution_has_no_sparsity():
    params, masked, model = start(make_pruner(sparsity.SET))
    layers_only = sparsity.Uniform(0.75, filter_fn=lambda path, _: path[-1] == "layers")
    pruner = make_pruner(sparsity.SET, sparsity_distribution_fn=layers_only)
    state = pruner.wrap_optax(ADAM, masks=masked.masks).init(params)
    expected = pruner.update_state(state, params, params).masks
    moved = model.move(pruner, model.params, model.opt_state, 0)[0]
    assert_equal(moved.masks, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sparsity.SET, sparsity.RigL])
def test_a_run_with_moves_is_that_of_the_wrapped_optimizer(kind):
    pruner = make_pruner(kind, scheduler=sparsity.PeriodicSchedule(10, 10, 20))
    params, x = make_params(), make_inputs()
    wrapped, graph = pruner.wrap_optax(ADAM), trace(model_fn, params, x[0])
    state = wrapped.init(params)
    params = pruner.post_gradient_update(params, state)
    model = compact(graph, params, state.masks)
    carry = model, model.params, ADAM.init(model.params)

    def draw(i):
        return functools.partial(loss_fn, x=x[0] * jnp.cos(i), y=x[1])

    def step_masked(carry, i):
        params, state = carry
        updates, state = wrapped.update(jax.grad(draw(i), 1)(model_fn, params), state, params)
        return (optax.apply_updates(params, updates), state), None

    def step(model, values, moments, i):
        grads = jax.grad(draw(i), 1)(model.apply, values)
        updates, moments = ADAM.update(grads, moments, values)
        return model, optax.apply_updates(values, updates), moments

    def step_or_move(carry, i):
        def move(model, values, moments, i):
            return model.move(pruner, values, moments, i, draw(i))

        return jax.lax.cond(pruner.scheduler.is_mask_update_iter(i), move, step, *carry, i), None

    first, steps = state.masks, jnp.arange(30)
    run = jax.jit(jax.lax.scan, static_argnums=0)
    params, state = run(step_masked, (params, state), steps)[0]
    model, values, moments = run(step_or_move, carry, steps)[0]
    assert (state.masks["layers"] != first["layers"]).sum() > 20
    assert_equal(model.masks, state.masks)
    assert moments[0].count == state.inner_state[0].count == 28
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5), model.dense(values), params
    )


def numpy_move(mask, weights, grads, fraction):
    """Drops the smallest kept weights, grows the largest gradients of all others; ties by index."""
    mask, weights, grads = (np.asarray(x, np.float64).ravel() for x in (mask, weights, grads))
    places = np.flatnonzero(mask)
    kept = max(1, int(np.round(len(places) * (1 - np.float64(np.float32(fraction))))))
    order = np.argsort(-np.abs(weights[places]), kind="stable")[:kept]
    new = np.zeros_like(mask)
    new[places[order]] = 1
    free = np.flatnonzero(new == 0)
    new[free[np.argsort(-np.abs(grads[free]), kind="stable")[: len(places) - kept]]] = 1
    return new


def by_rows(apply, params, x, y):
    rows = jax.vmap(lambda row: apply(params, row[None])[0])(x)
    return jnp.mean(jnp.square(rows - y))


def by_microbatches(apply, params, x, y):
    def add(total, batch):
        return total + jnp.mean(jnp.square(apply(params, batch[0]) - batch[1])), None

    return jax.lax.scan(add, 0.0, (x.reshape(2, 2, -1), y.reshape(2, 2, -1)))[0]


def call_twice(apply, params, x, y):
    return jnp.mean(apply(params, x) * y) + jnp.mean(jnp.square(apply(params, 2 * x)))


def with_casts(apply, params, x, y):
    halved = jax.tree.map(lambda p: (p / 2).astype(jnp.bfloat16), params)
    return jnp.mean(jnp.square(apply(halved, x.astype(jnp.bfloat16)) - y))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [by_rows, by_microbatches, call_twice, jax.checkpoint(by_rows, static_argnums=0)]
)
def test_any_loss_ranks_its_complete_gradient(loss):
    pruner = make_pruner(sparsity.RigL, drop_fraction_fn=optax.constant_schedule(0.4))
    params, state, model = start(pruner)
    x, y = make_inputs()
    grads = jax.jit(jax.grad(functools.partial(loss, model_fn)))(params, x, y)
    moved, *_ = jax.jit(
        lambda model, values, moments: model.move(
            pruner, values, moments, 0, lambda apply, params: loss(apply, params, x, y)
        )
    )(model, model.params, model.opt_state)
    for name, slices in (("embedding", 1), ("layers", 3)):
        arrays = [
            np.asarray(tree[name]).reshape(slices, -1) for tree in (state.masks, params, grads)
        ]
        expected = [numpy_move(*each, 0.4) for each in zip(*arrays, strict=True)]
        np.testing.assert_array_equal(moved.masks[name].reshape(slices, -1), expected)


def test_a_loss_may_cast_the_kept_values():
    pruner = make_pruner(sparsity.RigL)
    params, _, model = start(pruner)
    x, y = make_inputs()
    moved, values, _ = model.move(
        pruner, model.params, model.opt_state, 0, lambda f, p: with_casts(f, p, x, y)
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(values)} == {"float32"}
    stays = jax.tree.map(lambda new, old: new * old, moved.masks, model.masks)
    kept = {n: p if stays[n] is None else p * stays[n] for n, p in params.items()}
    assert_equal(moved.dense(values), kept)


@pytest.mark.parametrize("maps_params", [True, False])
def test_models_move_in_parallel_under_vmap(maps_params):
    pruner = make_pruner(sparsity.RigL)
    _, _, model = start(pruner)
    x, y = make_inputs()

    def move(values, x):
        moved, *_ = model.move(
            pruner, values, model.opt_state, 0, functools.partial(loss_fn, x=x, y=y)
        )
        return moved.indices

    values = [model.params, jax.tree.map(jnp.flip, model.params)]
    alone = jax.jit(move)
    if maps_params:
        stacked = jax.tree.map(lambda *v: jnp.stack(v), *values)
        both = jax.jit(jax.vmap(move))(stacked, jnp.stack([x, x[::-1] ** 2]))
    else:
        values[1] = values[0]
        both = jax.jit(jax.vmap(move, (None, 0)))(values[0], jnp.stack([x, x[::-1] ** 2]))
    for i, inputs in enumerate((x, x[::-1] ** 2)):
        assert_equal(jax.tree.map(lambda v, i=i: v[i], both), alone(values[i], inputs))


@pytest.mark.slow
def test_later_moves_and_steps_compile_nothing(caplog):
    pruner = make_pruner(sparsity.RigL)
    _, _, model = start(pruner)
    x, y = make_inputs()
    values, moments = model.params, model.opt_state

    @jax.jit
    def step(model, values, moments, x, y):
        grads = jax.grad(functools.partial(loss_fn, model.apply))(values, x, y)
        updates, moments = ADAM.update(grads, moments, values)
        return optax.apply_updates(values, updates), moments

    batches = [(x, y), (y, x), (-x, y)]
    for index, (x, y) in enumerate(batches):
        with jax.log_compiles(), caplog.at_level("WARNING"):
            values, moments = step(model, values, moments, x, y)
            loss = jax.tree_util.Partial(loss_fn, x=x, y=y)
            model, values, moments = model.move(pruner, values, moments, 10 * index, loss)
        compiled = [record for record in caplog.records if "Compiling" in record.message]
        assert bool(compiled) == (index == 0)
        caplog.clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sparsity.SET, sparsity.RigL, SRIGL])
def test_a_move_needs_less_memory_than_a_masked_step_that_moves(kind):
    layers, width = 8, 256
    params = {"w": jax.random.normal(jax.random.key(0), (layers, width, width)) / 16}

    def fn(params, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0]

    x = jnp.ones((64, width))
    pruner = make_pruner(kind, sparsity_distribution_fn=sparsity.Uniform(0.9))
    wrapped = pruner.wrap_optax(ADAM)
    state = wrapped.init(params)
    model = compact(trace(fn, params, x), params, state.masks)

    def loss(apply, params):
        return jnp.sum(jnp.square(apply(params, x)))

    def step(params, state):
        updates, state = wrapped.update(jax.grad(loss, 1)(fn, params), state, params)
        return optax.apply_updates(params, updates), state

    def move(model, values, state):
        return model.move(pruner, values, state, 0, None if kind is sparsity.SET else loss)

    def count_bytes(fn, *arguments):
        donated = tuple(range(len(arguments)))
        compiled = jax.jit(fn, donate_argnums=donated).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    moved = count_bytes(move, model, model.params, ADAM.init(model.params))
    assert moved < count_bytes(step, params, state)


def test_stacks_whose_layers_keep_different_numbers_stay_padded():
    params = {"layers": make_params()["layers"][:, :8, :8]}
    counts = (5, 12, 3)
    rng = np.random.default_rng(0)
    masks = {"layers": np.stack([rng.permutation(64).reshape(8, 8) < n for n in counts])}
    masks = jax.tree.map(lambda mask: mask.astype(np.uint8), masks)

    def fn(params, x):
        return jax.lax.scan(lambda h, w: (h @ w, None), x, params["layers"])[0]

    model = compact(trace(fn, params, jnp.ones((2, 8))), params, masks)
    pruner = make_pruner(sparsity.SET)
    moved, values, _ = model.move(pruner, model.params, ADAM.init(model.params), 3)
    assert moved.masks["layers"].sum((1, 2)).tolist() == list(counts)
    assert (moved.masks["layers"] != masks["layers"]).any()
    assert jax.tree.structure(moved) == jax.tree.structure(model)
    both = masks["layers"] * moved.masks["layers"]
    np.testing.assert_array_equal(moved.dense(values)["layers"], params["layers"] * both)


@pytest.mark.slow
def test_the_format_dense_moves_and_drops_values_and_moments():
    pruner = make_pruner(sparsity.RigL)
    formats = {"layers": "dense", "embedding": "values"}
    _, _, model = start(pruner, formats=formats)
    reference = start(pruner)[2]
    x, y = make_inputs()
    loss = jax.tree_util.Partial(loss_fn, x=x, y=y)
    moved, values, moments = model.move(pruner, model.params, model.opt_state, 0, loss)
    expected = reference.move(pruner, reference.params, reference.opt_state, 0, loss)
    assert moved.formats == {("embedding",): "values", ("layers",): "dense"}
    assert_equal(moved.masks, expected[0].masks)
    assert_equal(values["layers"], expected[0].dense(expected[1])["layers"])
    assert_equal(moments[0].mu["layers"], expected[0].dense_state(expected[2])[0].mu["layers"])


def test_a_static_mask_does_not_move():
    pruner = make_pruner(sparsity.StaticRandomSparse, scheduler=sparsity.NoUpdateSchedule())
    _, _, model = start(pruner)
    values, state = jax.tree.map(jnp.copy, (model.params, model.opt_state))
    moved = model.move(pruner, values, state, 0)[0]
    assert moved.indices is model.indices
    assert moved.params is values
    assert moved.opt_state is state


def test_tune_after_a_donated_step_needs_the_state_of_that_step():
    pruner = make_pruner(sparsity.SET)
    model = start(pruner)[2]
    model, values, state = model.move(pruner, model.params, model.opt_state, 0)
    step = jax.jit(ADAM.update, donate_argnums=(0, 1))
    values, state = step(values, state)
    x = make_inputs()[0]
    with pytest.raises(ValueError, match=r"opt_state is None, and params are not"):
        model.tune(values, x, rounds=1)
    tuned = model.tune(values, x, rounds=1, opt_state=state)
    assert_equal(tuned.dense(tuned.params), model.dense(values))
    assert tuned.opt_state[0].count == state[0].count == 2


@pytest.mark.slow
def test_grown_entries_start_as_init_of_the_optimizer_gives_them():
    pruner, tx = make_pruner(sparsity.SET), optax.adagrad(0.1, initial_accumulator_value=0.25)
    _, _, model = start(pruner, tx=tx)
    with pytest.raises(ValueError, match=r"ScaleByRssState.*tx=tx"):
        model.move(pruner, model.params, model.opt_state, 0)
    moved, _, moments = model.move(pruner, model.params, model.opt_state, 0, tx=tx)
    grown = (moved.masks["layers"] > 0) & (model.masks["layers"] == 0)
    sums = moved.dense_state(moments)[0].sum_of_squares["layers"]
    assert grown.any()
    assert set(sums[grown].tolist()) == {0.25}


def test_a_move_leaks_no_tracer():
    pruner = make_pruner(sparsity.RigL)
    _, _, model = start(pruner)
    x, y = make_inputs()
    loss = jax.tree_util.Partial(loss_fn, x=x, y=y)
    with checking_leaks():
        model.move(pruner, model.params, model.opt_state, 0, loss)


@pytest.mark.parametrize("hook", ["get_drop_scores", "score_move"])
def test_drop_scores_of_a_subclass_move_compact_masks(hook):
    class Largest(sparsity.SET):
        """Drops the largest weights, and grows the smallest of all."""

        @sparsity.elementwise
        def get_grow_scores(self, sparse_state, params, grads):
            return jax.tree.map(lambda w: -jnp.abs(w), params)

    def get_drop_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda w: -jnp.abs(w), params)

    def score_move(self, sparse_state, inputs):
        _, grow, fraction = sparsity.SET.score_move(self, sparse_state, inputs)
        return get_drop_scores(self, sparse_state, inputs.masked_weights, None), grow, fraction

    setattr(Largest, hook, locals()[hook])
    pruner, masks = make_pruner(Largest), {"w": np.eye(4, dtype=np.uint8)}
    params, x = {"w": jnp.diag(jnp.array([1.0, 2.0, 3.0, 4.0]))}, jnp.ones((2, 4))
    graph = trace(lambda params, x: x @ params["w"], params, x)
    model = compact(graph, params, masks, formats={"w": "values"})
    moved, values, _ = model.move(pruner, model.params, ADAM.init(model.params), 0)
    weights = moved.dense(values)["w"]
    assert np.diag(weights).tolist() == [1, 2, 3, 0]  # by magnitude [0, 2, 3, 4]


@pytest.mark.slow
def test_a_subclass_that_ranks_complete_parameters_gets_them():
    class Normalized(sparsity.RigL):
        def get_grow_scores(self, sparse_state, params, grads):
            return jax.tree.map(lambda g: jnp.abs(g) / (1e-9 + jnp.max(g, axis=0)), grads)

    pruner = make_pruner(Normalized)
    params, state, model = start(pruner)
    x, y = make_inputs()
    grads = jax.grad(functools.partial(loss_fn, model_fn))(params, x, y)
    _, state = pruner.wrap_optax(ADAM).update(grads, state, params)
    loss = jax.tree_util.Partial(loss_fn, x=x, y=y)
    moved, *_ = model.move(pruner, model.params, model.opt_state, 0, loss)
    assert_equal(moved.masks, state.masks)


@pytest.mark.parametrize("algorithm", [sparsity.SET, sparsity.RigL])
def test_masks_that_keep_nothing_stay_empty(algorithm):
    params, masks = {"w": jnp.ones((6, 4))}, {"w": np.zeros((6, 4), np.uint8)}
    x = jnp.ones((2, 6))
    graph = trace(lambda params, x: x @ params["w"], params, x)
    model = compact(graph, params, masks, formats={"w": "values"})
    pruner = algorithm(sparsity_distribution_fn=sparsity.Uniform(0.5))
    loss = None if algorithm is sparsity.SET else lambda apply, params: apply(params, x).sum()
    moved, values, _ = model.move(pruner, model.params, ADAM.init(model.params), 0, loss)
    assert moved.indices["w"].shape == values["w"].shape == (0,)


class All(sparsity.Layerwise):
    keeps_targets = per_slice = False

    def move(self, leaves, drop_fraction):
        return [jnp.ones_like(leaf.mask) for leaf in leaves]


class Delegating:
    """Scope of a user, no subclass of `Layerwise`, that states what its masks keep."""

    per_slice = keeps_targets = True

    def check(self, pattern, batch_axes, topk_fn):
        pass

    def select(self, leaves, topk_fn):
        return sparsity.Layerwise().select(leaves, topk_fn)

    def move(self, leaves, drop_fraction):
        leaves = [leaf._replace(drop_scores=-leaf.drop_scores) for leaf in leaves]
        return sparsity.Layerwise().move(leaves, drop_fraction)


def test_a_scope_that_states_keeps_targets_moves_masks():
    params, x = {"w": jnp.array([[1.0], [2.0], [0.0], [0.0]])}, jnp.ones((1, 4))
    graph = trace(lambda params, x: x @ params["w"], params, x)
    model = compact(graph, params, {"w": np.array([[1], [1], [0], [0]], np.uint8)})
    pruner = sparsity.SET(scope=Delegating(), drop_fraction_fn=optax.constant_schedule(0.5))
    moved = model.move(pruner, model.params, ADAM.init(model.params), 0)[0]
    assert moved.indices["w"].shape == (2,)
    assert moved.indices["w"][0] == 0  # the larger weight is dropped


class Rows(sparsity.SparsityType):
    def pool(self, scores, batch_axes=0):
        return jnp.max(scores, axis=-1)

    def expand(self, units, shape, batch_axes=0):
        return jnp.broadcast_to(units[..., None], shape)


@pytest.mark.parametrize(
    ("pruner", "options", "message"),
    [
        (make_pruner(sparsity.RigL), {}, "grads = None: pass them."),
        (make_pruner(sparsity.GlobalRigL, batch_axes=0), {}, r"scope = Global\("),
        (make_pruner(sparsity.SET, scope=All()), {}, r"All\(\) parameters may trade entries"),
        (make_pruner(sparsity.SET, batch_axes=0), {}, r"'layers' .*batch_axes = 0.*batch_axes=1"),
        (make_pruner(sparsity.MagnitudePruning), {}, "MagnitudePruning may keep another number"),
        (make_pruner(sparsity.SET, Rows()), {}, "another number of entries"),
        (make_pruner(sparsity.SRigL), {}, "SRigL may keep another .*min_salient=None"),
        (make_pruner(sparsity.SET), {"outside": "frozen"}, "outside = 'frozen'"),
    ],
)
def test_updates_that_would_change_shapes_are_refused(pruner, options, message):
    _, _, model = start(make_pruner(sparsity.SET), **options)
    with pytest.raises(ValueError, match=message):
        model.move(pruner, model.params, model.opt_state, 0)


def test_groups_that_a_pattern_does_not_keep_are_refused():
    model = start(make_pruner(sparsity.SET, FanIn(4)))[2]
    assert model.formats["layers",] == "grouped"
    with pytest.raises(ValueError, match=r"keeps no groups of 4 outputs.*'values'"):
        model.move(make_pruner(sparsity.SET), model.params, model.opt_state, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "target"), [(Unstructured(), 0.0), (FanIn(16), 0.0), (FanIn(16), 0.75)]
)
def test_all_outputs_of_a_narrow_layer_may_read_the_same_inputs(pattern, target):
    """Moves a layer of 10 outputs beside one that is pruned, as ERK does with small layers."""
    rng = np.random.default_rng(0)
    params = {
        "hidden": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
        "logits": jnp.asarray(rng.normal(size=(16, 10)), jnp.float32),
    }

    def fn(params, x):
        return jnp.tanh(x @ params["hidden"]) @ params["logits"]

    pruner = make_pruner(
        sparsity.RigL,
        pattern,
        sparsity_distribution_fn=lambda params: {"hidden": 0.5, "logits": target},
    )
    wrapped, x = pruner.wrap_optax(ADAM), make_inputs()[0]
    state = wrapped.init(params)
    params = jax.tree.map(lambda p, m: p * m, params, state.masks)
    model = compact(trace(fn, params, x), params, state.masks)
    assert model.formats["logits",] == "grouped"
    assert model.params["logits"].shape[-1] == 10

    def loss(apply, params):
        return jnp.mean(jnp.square(apply(params, x) - 1))

    moved, values, _ = model.move(pruner, model.params, ADAM.init(model.params), 0, loss)
    grads = jax.grad(lambda params: loss(fn, params))(params)
    _, expected = wrapped.update(grads, state, params)
    assert_equal(moved.masks, expected.masks)
    assert_equal(moved.dense(values), jax.tree.map(lambda p, m: p * m, params, expected.masks))


def test_parameters_of_another_model_are_refused():
    model = start(make_pruner(sparsity.SET))[2]
    params = {**model.params, "layers": model.params["layers"][:, :5]}
    with pytest.raises(ValueError, match=r"'layers' have .* like model\.params"):
        model.move(make_pruner(sparsity.SET), params, ADAM.init(params), 0)
