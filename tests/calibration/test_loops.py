"""Weights that a loop reads in each of its steps are pruned by the inputs of all steps.

The definition: weights are pruned one after the other in the order of the program. Each is pruned
by the rows that it meets in all steps of the model, run with the weights pruned before it.
`unrolled` does this with a plain program of the model, which tells what each weight meets.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import sparsity
from sparsity import LeastSquares, SparseGPTPruning, Uniform, WandaPruning, calibration
from tests.calibration import models

HALF = {"sparsity_distribution_fn": Uniform(0.5)}
WANDA = WandaPruning(**HALF)


def draw(seed, *shape):
    scale = np.float32(np.sqrt(shape[-2]))
    return jnp.asarray(models.normal(seed, *shape) / scale)


def unrolled(plain, params, names, batches, pruner=WANDA, refit=None):
    """Prunes weights by the definition; returns them with their errors.

    Args:
      plain: `plain(params, x, tap)` runs a batch and calls `tap(name, rows)` with what a weight
        meets.
      params: {name: matrix [inputs, outputs]}.
      names: the weights, in the order in which they are pruned.
      batches: the data.
      pruner: prunes one matrix.
      refit: refits it.
    """
    now, errors = dict(params), {}
    for name in names:
        rows = []

        def tap(part, met, name=name, rows=rows):
            if part == name:
                rows.append(np.asarray(met, np.float64).reshape(-1, met.shape[-1]))

        for x in batches:
            plain(now, x, tap)
        met = np.concatenate(rows)
        seen = sparsity.Statistic(
            gram=jnp.asarray(met.T @ met, jnp.float32),
            squares=jnp.asarray((met**2).sum(0), jnp.float32),
            count=len(met),
            contracting=(0,),
            output=(1,),
        )
        now[name] = calibration.prune(pruner, params[name], {(): seen}, refit)[0]
        lost, total = (np.sum((met @ w) ** 2) for w in (params[name] - now[name], params[name]))
        errors[name] = lost / total
    return now, errors


def check(actual, report, expected, errors):
    """Compares pruned weights, whose zeros must be the same, and errors."""
    for name in errors:
        np.testing.assert_array_equal(
            np.asarray(actual[name]) != 0, np.asarray(expected[name]) != 0
        )
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(report[name].error, errors[name], rtol=2e-3)


# A plain recurrent network: the recurrent weight meets zeros in the first step.

RNN = {"in": draw(0, 6, 8), "hidden": draw(1, 8, 8), "out": draw(2, 8, 3)}
BATCHES = [draw(3, 5, 4, 6), draw(4, 5, 4, 6)]  # [steps, rows, inputs]


def rnn(params, xs):
    def step(h, x):
        h = jnp.tanh(x @ params["in"] + h @ params["hidden"])
        return h, h

    start = jnp.zeros((xs.shape[1], 8))
    return lax.scan(step, start, xs)[1] @ params["out"]


def plain_rnn(params, xs, tap):
    h = np.zeros((xs.shape[1], 8))
    hidden = []
    for x in np.asarray(xs):
        tap("in", x)
        tap("hidden", h)
        h = np.tanh(x @ params["in"] + h @ params["hidden"])
        hidden.append(h)
    tap("out", np.stack(hidden))


RUNS = {
    "wanda": (WANDA, None),
    "magnitude": (sparsity.MagnitudePruning(**HALF), None),
    "least squares": (WANDA, LeastSquares()),
    "sparsegpt": (SparseGPTPruning(**HALF), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_all_steps_of_a_scan_count(name):
    pruned, masks, report = sparsity.oneshot(RUNS[name][0], rnn, RNN, BATCHES, RUNS[name][1])
    expected = unrolled(plain_rnn, RNN, ("in", "hidden", "out"), BATCHES, *RUNS[name])
    check(pruned, by_name(report), *expected)
    assert [*report] == [("in",), ("hidden",), ("out",)]
    assert [row.count for row in report.values()] == [40, 40, 40]
    np.testing.assert_array_equal(masks["hidden"], pruned["hidden"] != 0)


def by_name(report):
    return {path[-1]: row for path, row in report.items()}


def test_all_entries_of_a_map_count():
    def mapped(params, xs):
        return lax.map(lambda x: jnp.tanh(x @ params["in"]) @ params["hidden"], xs) @ params["out"]

    def plain(params, xs, tap):
        for x in np.asarray(xs):
            tap("in", x)
            h = np.tanh(x @ params["in"])
            tap("hidden", h)
            tap("out", h @ params["hidden"])

    pruned, _, report = sparsity.oneshot(WANDA, mapped, RNN, BATCHES)
    check(pruned, by_name(report), *unrolled(plain, RNN, ("in", "hidden", "out"), BATCHES))


# Stacks of recurrent layers: a scan over layers around one over steps, and the other way round.

STACK = {"in": draw(5, 3, 8, 8), "hidden": draw(6, 3, 8, 8)}
UNSTACKED = {f"{name}{i}": leaf[i] for name, leaf in STACK.items() for i in range(3)}
SEQUENCES = [draw(7, 4, 5, 8), draw(8, 4, 5, 8)]


def layers_around_steps(params, xs):
    def layer(xs, w):
        def step(h, x):
            h = jnp.tanh(x @ w["in"] + h @ w["hidden"])
            return h, h

        return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1], None

    return lax.scan(layer, xs, params)[0]


def steps_around_layers(params, xs):
    def step(state, x):
        def layer(x, inputs):
            w, h = inputs
            h = jnp.tanh(x @ w["in"] + h @ w["hidden"])
            return h, h

        x, state = lax.scan(layer, x, (params, state))
        return state, x

    return lax.scan(step, jnp.zeros((3, *xs.shape[1:])), xs)[1]


def plain_stack(params, xs, tap):
    xs = np.asarray(xs)
    for i in range(3):
        h, outputs = np.zeros(xs.shape[1:]), []
        for x in xs:
            tap(f"in{i}", x)
            tap(f"hidden{i}", h)
            h = np.tanh(x @ params[f"in{i}"] + h @ params[f"hidden{i}"])
            outputs.append(h)
        xs = np.stack(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["wanda", "least squares"])
@pytest.mark.parametrize("model", [layers_around_steps, steps_around_layers])
def test_stacked_recurrent_layers_are_pruned_one_by_one(model, pruner):
    pruned, _, report = sparsity.oneshot(RUNS[pruner][0], model, STACK, SEQUENCES, RUNS[pruner][1])
    names = [f"{name}{i}" for i in range(3) for name in ("in", "hidden")]
    expected, errors = unrolled(plain_stack, UNSTACKED, names, SEQUENCES, *RUNS[pruner])
    for name, weights in expected.items():
        layer = pruned[name[:-1]][int(name[-1])]
        np.testing.assert_array_equal(layer != 0, weights != 0)
        np.testing.assert_allclose(layer, weights, rtol=2e-3, atol=2e-3)
    for name in ("in", "hidden"):
        mean = np.mean([errors[f"{name}{i}"] for i in range(3)])
        np.testing.assert_allclose(report[(name,)].error, mean, rtol=2e-3)


def test_a_weight_that_all_layers_share_is_pruned_when_the_first_layer_reaches_it():
    params = {"own": draw(5, 3, 8, 8), "shared": draw(6, 8, 8), "last": draw(7, 8, 2)}

    def model(params, x):
        def layer(h, part):
            return h + jnp.tanh(h @ part) @ params["shared"], None

        return lax.scan(layer, x, params["own"], reverse=True)[0] @ params["last"]

    def plain(params, x, tap):
        h = np.asarray(x)
        for i in (2, 1, 0):
            tap(f"own{i}", h)
            inner = np.tanh(h @ params[f"own{i}"])
            tap("shared", inner)
            h = h + inner @ params["shared"]
        tap("last", h)

    flat = {f"own{i}": params["own"][i] for i in range(3)}
    flat |= {"shared": params["shared"], "last": params["last"]}
    batches = [draw(8, 20, 8), draw(9, 20, 8)]
    names = ("own2", "shared", "own1", "own0", "last")
    expected, errors = unrolled(plain, flat, names, batches)
    pruned, _, report = sparsity.oneshot(WANDA, model, params, batches)
    check(pruned, by_name(report), expected, {name: errors[name] for name in ("shared", "last")})
    for i in range(3):
        np.testing.assert_allclose(pruned["own"][i], expected[f"own{i}"], atol=1e-6)


def test_branches_are_pruned_where_they_are_reached_and_count_their_own_rows():
    params = {name: draw(i, 8, 8) for i, name in enumerate(("even", "odd", "last"))}

    def model(params, xs):
        def step(h, x):
            index, x = x
            branches = [lambda h, part=part: h @ params[part] for part in ("even", "odd")]
            return jnp.tanh(lax.switch(index % 2, branches, h) + x), None

        indices = jnp.arange(len(xs))
        return lax.scan(step, xs[0], (indices, xs))[0] @ params["last"]

    def plain(params, xs, tap):
        h = np.asarray(xs[0])
        for i, x in enumerate(np.asarray(xs)):
            name = ("even", "odd")[i % 2]
            tap(name, h)
            h = np.tanh(h @ params[name] + x)
        tap("last", h)

    batches = [draw(8, 5, 6, 8), draw(9, 5, 6, 8)]
    pruned, _, report = sparsity.oneshot(WANDA, model, params, batches)
    check(pruned, by_name(report), *unrolled(plain, params, ("even", "odd", "last"), batches))
    assert {name: row.count for name, row in by_name(report).items()} == {
        "even": 36, "odd": 24, "last": 12,
    }  # fmt: skip


def test_a_weight_used_in_a_loop_and_outside_sees_what_the_first_of_them_does():
    params = {"tied": draw(0, 8, 8)}

    def loop_first(params, xs):
        h = lax.scan(lambda h, x: (jnp.tanh(h @ params["tied"] + x), None), xs[0], xs)[0]
        return 5 * h @ params["tied"]

    def loop_last(params, xs):
        start = 5 * xs[0] @ params["tied"]
        return lax.scan(lambda h, x: (jnp.tanh(h @ params["tied"] + x), None), start, xs)[0]

    def plain_loop(params, xs, tap):
        h = np.asarray(xs[0])
        for x in np.asarray(xs):
            tap("tied", h)
            h = np.tanh(h @ params["tied"] + x)

    def plain_product(params, xs, tap):
        tap("tied", 5 * xs[0])

    for model, plain in ((loop_first, plain_loop), (loop_last, plain_product)):
        pruned, _, report = sparsity.oneshot(WANDA, model, params, SEQUENCES)
        check(pruned, by_name(report), *unrolled(plain, params, ("tied",), SEQUENCES))


def test_weights_of_a_while_loop_are_refused():
    params = {"first": draw(0, 8, 8), "again": draw(1, 8, 8)}

    def model(params, x):
        h = x @ params["first"]
        return lax.while_loop(lambda h: h.sum() < 0, lambda h: h @ params["again"], h)

    with pytest.raises(ValueError, match=r"'again', which.*is read in a while loop.*as a scan"):
        sparsity.oneshot(WANDA, model, params, [draw(2, 4, 8)])
    with pytest.raises(ValueError, match=r"'again', which.*is read in a while loop"):
        sparsity.oneshot(WANDA, model, params, [draw(2, 4, 8)], sequential=False)


def test_weights_that_a_loop_changes_on_its_way_are_refused():
    def model(params, xs):
        def step(carry, x):
            w, h = carry
            return (w + 0.1 * h.T @ x, jnp.tanh(h @ w + x)), None

        return lax.scan(step, (params["fast"], xs[0]), xs)[0][1]

    with pytest.raises(ValueError, match="No product reads 'fast', which has a sparsity, as a wh"):
        sparsity.oneshot(WANDA, model, {"fast": draw(0, 8, 8)}, SEQUENCES)
    assert not sparsity.calibrate(model, {"fast": draw(0, 8, 8)}, SEQUENCES)


# Cells of flax: all gates, in the order in which the cells read their weights.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_lstm(params, xs, tap):
    """[rows, steps, inputs] as flax's `LSTMCell` computes."""
    xs = np.asarray(xs)
    h = c = np.zeros((xs.shape[0], 8))
    for x in np.moveaxis(xs, 1, 0):
        gates = {}
        for gate in "ifgo":
            tap(f"i{gate}", x)
            tap(f"h{gate}", h)
            bias = params.get(f"b{gate}", 0)
            gates[gate] = x @ params[f"i{gate}"] + h @ params[f"h{gate}"] + bias
        c = sigmoid(gates["f"]) * c + sigmoid(gates["i"]) * np.tanh(gates["g"])
        h = sigmoid(gates["o"]) * np.tanh(c)


def plain_gru(params, xs, tap):
    """[rows, steps, inputs] as flax's `GRUCell` computes."""
    xs = np.asarray(xs)
    h = np.zeros((xs.shape[0], 8))
    for x in np.moveaxis(xs, 1, 0):
        for gate in "rzn":
            tap(f"i{gate}", x)
            tap(f"h{gate}", h)
        r, z = (sigmoid(x @ params[f"i{g}"] + h @ params[f"h{g}"]) for g in "rz")
        n = np.tanh(x @ params["in"] + r * (h @ params["hn"]))
        h = (1 - z) * n + z * h


ROWS = [draw(10, 6, 5, 4), draw(11, 6, 5, 4)]  # [rows, steps, inputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "plain"), [(nn.LSTMCell, plain_lstm), (nn.GRUCell, plain_gru)], ids=["lstm", "gru"]
)
def test_recurrent_cells_of_linen_see_all_steps(cell, plain):
    model = nn.RNN(cell(8))
    params = model.init(jax.random.key(0), ROWS[0])
    pruned, _, report = sparsity.oneshot(WANDA, model.apply, params, ROWS)
    flat = {path[-2]: leaf for path, leaf in flatten(params).items() if path[-1] == "kernel"}
    names = [path[-2] for path in report]
    assert sorted(names) == sorted(flat)
    expected, errors = unrolled(plain, flat, names, ROWS)
    kernels = {path[-2]: leaf for path, leaf in flatten(pruned).items() if path[-1] == "kernel"}
    rows = {path[-2]: row for path, row in report.items()}
    check(kernels, rows, expected, errors)


def flatten(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(entry.key for entry in path): leaf for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("cell", [nnx.GRUCell, nnx.SimpleCell, nnx.OptimizedLSTMCell])
def test_statistics_of_fused_cells_of_nnx_are_those_of_a_loop(cell):
    definition, params = nnx.split(nnx.RNN(cell(4, 8, rngs=nnx.Rngs(0))))
    model = lambda params, x: nnx.merge(definition, params)(x)  # noqa: E731
    statistics = sparsity.calibrate(model, params, ROWS)
    squares = np.zeros(8)
    for batch in ROWS:
        step, zeros = cell(4, 8, rngs=nnx.Rngs(0)), jnp.zeros((6, 8))
        carry = (zeros, zeros) if cell is nnx.OptimizedLSTMCell else zeros  # (c, h) of an LSTM
        for i in range(batch.shape[1]):
            hidden = carry[1] if isinstance(carry, tuple) else carry
            squares += (np.asarray(hidden, np.float64) ** 2).sum(0)
            carry = step(carry, batch[:, i])[0]
    input_statistic, hidden_statistic = (
        statistics["cell", name, "kernel"] for name in ("dense_i", "dense_h")
    )
    inputs = sum((np.asarray(x, np.float64) ** 2).sum((0, 1)) for x in ROWS)
    np.testing.assert_allclose(input_statistic.squares, inputs, rtol=1e-5)
    np.testing.assert_allclose(hidden_statistic.squares, squares, rtol=1e-5)
    assert int(input_statistic.count) == int(hidden_statistic.count) == 60


@pytest.mark.slow
def test_recurrent_cells_of_nnx_see_all_steps():
    definition, params = nnx.split(nnx.RNN(nnx.LSTMCell(4, 8, rngs=nnx.Rngs(0))))
    model = lambda params, x: nnx.merge(definition, params)(x)  # noqa: E731
    pruned, _, report = sparsity.oneshot(WANDA, model, params, ROWS)
    names = {path: path[1].rstrip("_") for path in report}  # `if` is `if_` there
    flat = {name: params["cell"][path[1]]["kernel"][...] for path, name in names.items()}
    kernels = {name: pruned["cell"][path[1]]["kernel"][...] for path, name in names.items()}
    rows = {name: report[path] for path, name in names.items()}
    check(kernels, rows, *unrolled(plain_lstm, flat, [*flat], ROWS))
    assert len(flat) == 8
