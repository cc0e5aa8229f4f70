"""Shapes of kept values, their way back, and errors that name the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import compact, trace
from sparsity.compacting import table
from tests import helpers
from tests.compacting.models import masked


def fn(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


PARAMS = {"up": jnp.arange(1.0, 13.0).reshape(3, 4), "down": jnp.ones((4, 2))}
MASKS = {"up": np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]], np.uint8), "down": None}
X = jnp.ones((5, 3))
GRAPH = trace(fn, PARAMS, X)


def test_kept_values_stand_in_the_order_of_the_parameter():
    model = compact(GRAPH, PARAMS, MASKS)
    assert model.params["up"].tolist() == [1, 4, 6, 12]
    assert model.indices["up"].tolist() == [0, 3, 5, 11]
    assert model.indices["down"] is None
    assert model.formats == {("up",): "values"}
    dense = model.dense(model.params)
    np.testing.assert_array_equal(dense["up"], PARAMS["up"] * MASKS["up"])
    np.testing.assert_array_equal(model.masks["up"], MASKS["up"])
    assert model.masks["up"].dtype == jnp.uint8
    assert model.masks["down"] is None
    assert jax.tree.leaves(model)[0] is model.indices["up"]
    assert len(jax.tree.leaves(model)) == 1


@pytest.mark.parametrize("name", ["params", "opt_state", "tx"])
def test_a_model_that_jax_made_from_its_leaves_says_what_it_lacks(name):
    model = compact(GRAPH, PARAMS, MASKS)
    mapped = jax.tree.map(jnp.asarray, model)
    with pytest.raises(AttributeError, match=f"no {name}: jax made it from its leaves.* Keep"):
        getattr(mapped, name)
    with pytest.raises(AttributeError, match="no attribute 'parameters'"):
        mapped.parameters  # noqa: B018
    assert (model.opt_state, model.tx) == (None, None)
    assert jax.tree.structure(mapped) == jax.tree.structure(model)


def test_a_model_that_jax_made_from_its_leaves_works_with_parameters_beside_it(monkeypatch):
    model = compact(GRAPH, PARAMS, MASKS)
    mapped = jax.tree.map(jnp.asarray, model)
    values, state = model.params, optax.sgd(0.1, momentum=0.9).init(model.params)
    np.testing.assert_array_equal(mapped.apply(values, X), model.apply(values, X))
    np.testing.assert_array_equal(mapped.dense(values)["up"], model.dense(values)["up"])
    assert mapped.report() == model.report()
    monkeypatch.setattr(table, "time_in_turn", lambda *runs, rounds: [1.0] * len(runs))
    with pytest.raises(AttributeError, match="no opt_state"):
        mapped.tune(values, X)
    assert mapped.tune(values, X, opt_state=state).opt_state[0].trace["up"].shape == (4,)
    assert mapped.tune(values, X, opt_state=()).opt_state == ()
    pruner = sparsity.SET(sparsity_distribution_fn=sparsity.Uniform(0.5))
    move = jax.jit(lambda *args: args[0].move(pruner, *args[1:]))
    moved, *_ = move(mapped, values, state, 0)
    with pytest.raises(AttributeError, match="no params"):
        moved.params  # noqa: B018
    moved = mapped.move(pruner, values, state, 0)[0]
    assert moved.params["up"].shape == (4,)


def test_slices_that_keep_equally_many_entries_are_rows():
    for name, shape in (("scanned", (3, 50)), ("scanned_along_axis_1", (3, 50))):
        _, params, _, _, graph = masked(name)
        order = (1, 0, 2) if name == "scanned_along_axis_1" else (0, 1, 2)
        layers = [np.random.default_rng(i).permutation(144).reshape(12, 12) < 50 for i in range(3)]
        mask = np.stack(layers).transpose(order)
        model = compact(graph, params, [mask.astype(np.uint8)])
        assert model.params[0].shape == shape
        np.testing.assert_array_equal(model.params[0][1], params[0].transpose(order)[1][layers[1]])
        np.testing.assert_array_equal(model.dense(model.params)[0], params[0] * mask)


def test_layers_that_keep_other_numbers_are_padded_and_the_table_says_so():
    fn, params, masks, x, graph = masked("scanned")
    masks[0][0, :6] = 0
    params = [params[0] * masks[0]]
    model = compact(graph, params, masks)
    counts = masks[0].reshape(3, -1).sum(1)
    assert model.params[0].shape == (3, counts.max())
    padding = 3 * counts.max() - counts.sum()
    assert padding > 0
    assert f" {padding} " in model.report()
    np.testing.assert_array_equal(model.apply(model.params, x), fn(params, x))
    np.testing.assert_array_equal(model.masks[0], masks[0])
    tx = optax.lion(0.1, weight_decay=0.1)
    state = tx.init(model.params)
    values = model.params
    for _ in range(2):
        grads = jax.grad(lambda v: (model.apply(v, x) ** 2).sum())(values)
        updates, state = tx.update(grads, state, values)
        values = optax.apply_updates(values, updates)
    assert np.count_nonzero(values[0]) == counts.sum()


def test_a_mask_may_keep_everything_or_nothing():
    for value in (0, 1):
        masks = {"up": np.full((3, 4), value, np.uint8)}
        model = compact(GRAPH, PARAMS, masks)
        expected = fn({**PARAMS, "up": PARAMS["up"] * value}, X)
        np.testing.assert_array_equal(model.apply(model.params, X), expected)


def test_values_may_be_nan_and_entries_outside_the_masks_are_dropped():
    params = {**PARAMS, "up": PARAMS["up"].at[0, 0].set(jnp.nan).at[0, 1].set(jnp.inf)}
    model = compact(GRAPH, params, MASKS)
    assert jnp.isnan(model.params["up"][0])
    assert model.dense(model.params)["up"][0, 1] == 0


def test_shapes_alone_give_the_shapes_of_kept_values():
    shapes = jax.eval_shape(lambda: PARAMS)
    model = compact(GRAPH, shapes, MASKS)
    assert model.params["up"] == jax.ShapeDtypeStruct((4,), jnp.float32)
    stored = compact(GRAPH, PARAMS, MASKS)
    np.testing.assert_array_equal(model.apply(stored.params, X), stored.apply(stored.params, X))


def test_the_dense_format_trains_kept_entries_alone():
    model = compact(GRAPH, PARAMS, MASKS, formats={"up": "dense"})
    assert model.formats == {("up",): "dense"}
    assert model.params["up"].shape == (3, 4)
    grads = jax.grad(lambda p: (model.apply(p, X) ** 2).sum())(model.params)
    assert not np.any(np.asarray(grads["up"])[MASKS["up"] == 0])
    np.testing.assert_array_equal(
        model.apply(model.params, X),
        compact(GRAPH, PARAMS, MASKS).apply({**PARAMS, "up": jnp.array([1.0, 4, 6, 12])}, X),
    )


def test_second_derivatives_of_the_dense_format_are_those_of_values():
    def differentiate(formats):
        model = compact(GRAPH, PARAMS, MASKS, formats=formats)
        gradient = jax.grad(lambda params: model.apply(params, X / 100).sum())

        def second(params):
            squares = jax.grad(lambda p: sum((x**2).sum() for x in jax.tree.leaves(gradient(p))))
            return jax.jvp(gradient, (params,), (params,))[1], squares(params)

        return [model.dense(tree) for tree in jax.jit(second)(model.params)]

    jax.tree.map(
        lambda *trees: np.testing.assert_allclose(*trees, rtol=1e-5),
        differentiate({"up": "dense"}),
        differentiate({"up": "values"}),
    )


def test_an_updater_prunes_and_the_result_is_compact():
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    pruned, masks = pruner.instant_sparsify(PARAMS)
    model = compact(GRAPH, pruned, masks)
    np.testing.assert_array_equal(model.apply(model.params, X), fn(pruned, X))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"masks": None}, "masks is None: no entry would be removed. Give the masks of params.$"),
        ({"masks": {"across": MASKS["up"]}}, "'across' of shape .3, 4., of which the graph has 0"),
        ({"masks": {"up": MASKS["up"][:2]}}, "shape .2, 4. at 'up'"),
        ({"masks": {"up": 3 * MASKS["up"]}}, "'up' has entries other than 0 and 1, such as 3"),
        ({"masks": {"up": np.packbits(MASKS["up"], axis=-1)}}, "at 'up'.*Unpack packed masks"),
        ({"outside": "one"}, "outside = 'one'"),
        ({"outside": np.zeros(2)}, "outside must be 'zero' or 'frozen'"),
        ({"formats": {"up": "csr"}}, "formats.'up'. must be one of .*'csr'"),
        ({"formats": {"up": ["values"]}}, "formats.'up'. must be one of .*'values'"),
        ({"formats": {("up", 0): "values"}}, "path .'up', 0., which has no mask"),
        ({"formats": {"down": "values"}}, "'down', which has no mask. Masked are 'up'"),
        ({"opt_state": optax.sgd(0.1)}, "opt_state is an optimizer"),
        ({"tx": optax.sgd(0.1)}, "give opt_state"),
        (
            {
                "tx": optax.GradientTransformation(
                    *sparsity.NoPruning().wrap_optax(optax.sgd(0.1))
                ),
                "opt_state": sparsity.SparseState(),
            },
            "tx is a wrapped optimizer",
        ),
        ({"masks": sparsity.SparseState({"up": 1})}, "got the state of an optimizer"),
        ({"params": {"up": jnp.ones(4), "down": PARAMS["down"]}}, "shape .4,. at 'up'"),
        (
            {"params": {**PARAMS, "up": jnp.ones((3, 4), int)}},
            "'up', whose dtype int32 is not floating",
        ),
        ({"opt_state": jax.eval_shape(lambda: PARAMS)}, "opt_state.'down'. has no values yet"),
    ],
)
def test_errors_name_argument_value_and_parameter(arguments, message):
    with pytest.raises(ValueError, match=message):
        compact(GRAPH, **{"params": PARAMS, "masks": MASKS, **arguments})


def test_parameters_of_another_tree_or_of_a_smaller_model_are_refused():
    def fn(params, x):
        return jnp.tanh(x @ params["layer"]["up"]) @ params["layer"]["down"]

    graph = trace(fn, {"layer": PARAMS}, X)
    with pytest.raises(
        ValueError, match=r"an array 'down' of shape .4, 2., 'layer/down' in the graph"
    ):
        compact(graph, PARAMS, MASKS)
    smaller = {"up": PARAMS["up"][:, :2], "down": PARAMS["down"][:2]}
    for masks in (MASKS, {}):
        with pytest.raises(ValueError, match=r"shape .\d, 2. at '(up|down)', the graph was"):
            compact(GRAPH, smaller, masks)


def test_a_matrix_without_inputs_keeps_nothing():
    params = {"w": jnp.ones((0, 4))}
    graph = trace(lambda params, x: x @ params["w"], params, jnp.ones((2, 0)))
    model = compact(graph, params, {"w": np.ones((0, 4), np.uint8)})
    assert model.params["w"].size == 0
    assert model.apply(model.params, jnp.ones((2, 0))).tolist() == [[0, 0, 0, 0]] * 2


def test_integers_cannot_have_masks():
    params = {"w": jnp.ones((2, 2)), "q": jnp.ones((2, 2), jnp.int8)}
    graph = trace(lambda p, x: x @ p["w"] @ p["q"].astype(jnp.float32), params, jnp.ones((1, 2)))
    with pytest.raises(ValueError, match="'q', whose dtype int8 is not floating"):
        compact(graph, params, {"q": np.ones((2, 2), np.uint8)})


def test_other_parameters_are_refused_by_name():
    model = compact(GRAPH, PARAMS, MASKS)
    with pytest.raises(ValueError, match=r"kept values of 'up' have the shape .4,., got .3, 4."):
        model.apply(PARAMS, X)
    for down in (PARAMS["down"].T, jnp.float32(1)):  # the latter could be broadcast
        with pytest.raises(ValueError, match="parameter 'down' has the shape"):
            model.apply({**model.params, "down": down}, X)
    with pytest.raises(ValueError, match="no leaf at 'up'"):
        model.apply({"down": PARAMS["down"]}, X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruner": None}, "pruner must be an updater"),
        ({"pruner": sparsity.RigL}, "pruner must be an updater"),
        ({"count": "0"}, "count must be a number of steps, got count = '0'"),
        ({"count": None}, "count must be a number of steps, got count = None"),
        ({"count": 1.5}, "count must be a number of steps, got count = 1.5"),
        ({"count": -1}, "count must be a number of steps, got count = -1"),
        ({"count": jnp.ones(2, int)}, "count must be a number of steps"),
        ({"loss": "mean"}, "loss must be a function of .apply, params. or None"),
        ({"loss": lambda apply, params: apply(params, X)}, r"loss must return a real .* shape \("),
        ({"loss": lambda apply, params: None}, "loss must return a real .*, got a NoneType"),
        ({"loss": lambda apply, params: 1j * apply(params, X).sum()}, "type complex64"),
        ({"tx": "adam"}, "tx must be an optax.GradientTransformation"),
        ({"tx": optax.sgd(0.1)}, "opt_state is no state of tx for these params: '0/count'"),
        ({"opt_state": optax.adam(0.1).init(PARAMS)}, r"shape .3, 4. for 'up', whose kept values"),
    ],
)
def test_arguments_of_move_are_named(arguments, message):
    model = compact(GRAPH, PARAMS, MASKS)
    pruner = sparsity.SET(sparsity_distribution_fn=helpers.half)
    options = {"opt_state": optax.adam(0.1).init(model.params), "count": 0}
    with pytest.raises(ValueError, match=message):
        model.move(**{"pruner": pruner, "params": model.params, **options, **arguments})


def test_times_of_a_report_are_those_of_measure():
    with pytest.raises(ValueError, match=r"seconds must be the result of measure, or None, got"):
        compact(GRAPH, PARAMS, MASKS).report([0.1])


def test_tune_carries_no_state_of_earlier_parameters():
    tx = optax.adam(0.1)
    model = compact(GRAPH, PARAMS, MASKS, tx.init(PARAMS))
    values, state = model.params, model.opt_state
    for _ in range(3):
        updates, state = tx.update(values, state)
        values = optax.apply_updates(values, updates)
    with pytest.raises(ValueError, match=r"opt_state is None, and params are not"):
        model.tune(values, X, rounds=1)
    assert model.tune(values, X, rounds=1, opt_state=state).opt_state[0].count == 3
    assert model.tune(model.params, X, rounds=1).opt_state[0].count == 0
    without_state = compact(GRAPH, PARAMS, MASKS)
    assert without_state.tune(values, X, rounds=1).opt_state is None


def test_tune_refuses_the_state_of_other_parameters_before_it_measures(monkeypatch):
    monkeypatch.setattr(table, "time_in_turn", lambda *_, **__: pytest.fail("measured"))
    model = compact(GRAPH, PARAMS, MASKS)
    with pytest.raises(ValueError, match=r"opt_state has a leaf of shape .3, 4. for 'up'"):
        model.tune(model.params, X, rounds=7, opt_state=optax.adam(0.1).init(PARAMS))


FOREIGN = optax.adam(0.1).init({"other": jnp.ones(5)})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (FOREIGN, r"No leaf of opt_state belongs .*'0/mu/other' is an array of shape .5,."),
        ("x", "opt_state must be an optimizer's state, got opt_state = 'x'"),
    ],
)
def test_a_state_without_a_leaf_of_the_parameters_is_refused(state, message):
    model, pruner = compact(GRAPH, PARAMS, MASKS), sparsity.SET(drop_fraction_fn=lambda _: 0.5)
    calls = [
        lambda: compact(GRAPH, PARAMS, MASKS, state),
        lambda: model.tune(model.params, X, rounds=1, opt_state=state),
        lambda: model.move(pruner, model.params, state, 0),
        lambda: model.dense_state(state),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.sgd(optax.constant_schedule(0.1)),
        optax.masked(optax.adam(0.1), {"up": False, "down": True}),
        optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"up": "b", "down": "a"}),
    ],
)
def test_a_state_of_a_part_of_the_parameters_or_of_none_passes(tx, monkeypatch):
    monkeypatch.setattr(table, "time_in_turn", lambda *runs, rounds: [1.0] * len(runs))
    model, state = compact(GRAPH, PARAMS, MASKS, tx.init(PARAMS)), tx.init(PARAMS)
    expected = jax.tree.structure(state)
    assert jax.tree.structure(model.dense_state(model.opt_state)) == expected
    tuned = model.tune(model.params, X, rounds=1)
    assert jax.tree.structure(tuned.opt_state) == expected


def test_the_state_of_other_parameters_is_refused():
    with pytest.raises(ValueError, match=r"No leaf of opt_state .* shape .3, 4."):
        compact(GRAPH, PARAMS, MASKS, optax.adam(0.1).init([PARAMS["up"], PARAMS["down"]]))


def test_a_compact_state_of_other_batch_axes_is_refused_by_name():
    trainer = sparsity.SET(
        use_compact_state=True,
        batch_axes=2,
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(2),
    )
    state = trainer.wrap_optax(optax.sgd(0.1, 0.9)).init({"a": jnp.ones((2, 2, 4, 4))})
    params = {"a": jnp.ones(7)}
    graph = trace(lambda params, x: x * params["a"].sum(), params, jnp.ones(3))
    message = r"positions of the shape \(2, 2, 8\) for 'a' of shape \(7,\)"
    with pytest.raises(ValueError, match=message):
        compact(graph, params, {"a": np.ones(7)}, state)
