"""A primitive that jax does not have: one entry, and every analysis follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import sparsity
from sparsity.programs.entrywise import ENTRYWISE, Entrywise, fold_exactly
from sparsity.programs.layout import LAYOUTS, AxisRule, relate_same
from sparsity.programs.products import PRODUCTS, Operand, Product


def primitive(name, fn):
    """A primitive that computes `fn`, which is linear."""
    custom = Primitive(name)
    custom.def_impl(fn)
    custom.def_abstract_eval(
        lambda *x: jax.core.ShapedArray(jax.eval_shape(fn, *x).shape, x[0].dtype)
    )
    mlir.register_lowering(custom, mlir.lower_fun(fn, multiple_results=False))
    ad.deflinear2(custom, lambda ct, x: [jax.linear_transpose(fn, x.aval)(ct)[0]])
    batching.primitive_batchers[custom] = lambda args, axes: (jax.vmap(fn)(*args), 0)
    return custom


COPY = primitive("own_copy", lambda x: x)
TWICE = primitive("twice", lambda x: x * 2)
DOT = primitive("own_dot", jnp.matmul)
SWAP = primitive("swap_ends", lambda x: jnp.swapaxes(x, 0, -1))


def _swap(equation):
    last = len(equation.inputs[0].shape) - 1
    axes = [last, *range(1, last), 0]
    return [relate_same((0, axis), (0, i), "a swap of axes") for i, axis in enumerate(axes)]


def model(params, x):
    hidden = TWICE.bind(jax.nn.relu(x @ SWAP.bind(params["up"])))
    return hidden @ params["down"]


@pytest.fixture
def entries(monkeypatch):
    monkeypatch.setitem(ENTRYWISE, "twice", Entrywise(fold_exactly(lambda x: 2 * x)))
    monkeypatch.setitem(LAYOUTS, "swap_ends", AxisRule(_swap))


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(0))
    shapes = {"up": (8, 4), "down": (8, 3)}
    return {k: jax.random.normal(key, shapes[k]) for k, key in zip(shapes, keys, strict=True)}


def test_without_an_entry_a_primitive_keeps_all_that_it_touches(params):
    graph = sparsity.trace(model, params, jnp.ones((5, 4)))
    assert graph.groups == []
    assert {refusal.primitive for refusal in graph.refused if refusal.path == ("up",)} == {
        "swap_ends"
    }
    assert {*graph.uncounted} == {"twice", "swap_ends"}


def test_a_copy_of_ones_own_is_one_entry(monkeypatch, params):
    def outputs(params, x):
        return COPY.bind(x @ params["up"].T) + params["bias"]

    def find_biases():
        graph = sparsity.trace(outputs, params | {"bias": jnp.ones(8)}, jnp.ones((5, 4)))
        return graph.biases

    assert find_biases() == {}
    monkeypatch.setitem(ENTRYWISE, "own_copy", Entrywise(is_copy=True))
    assert {path: bias.path for path, bias in find_biases().items()} == {("up",): ("bias",)}


def test_with_one_entry_it_is_traced_shrunk_and_calibrated(entries, params):
    x = jax.random.normal(jax.random.key(1), (5, 4))
    graph = sparsity.trace(model, params, x)
    (group,) = graph.groups
    assert [*group.members] == [(("down",), 0), (("up",), 0)]
    assert [(use.path, use.contracting) for use in graph.uses] == [
        (("up",), (1,)),
        (("down",), (0,)),
    ]
    assert graph.uncounted == {}

    keep = np.array([1, 0, 1, 1, 0, 1, 0, 1], np.uint8)
    masks = {name: np.broadcast_to(keep[:, None], w.shape) for name, w in params.items()}
    small = sparsity.shrink(graph, params, masks)
    assert small.params["up"].shape == (5, 4)
    masked = jax.tree.map(jnp.multiply, params, masks)
    np.testing.assert_allclose(small.apply(small.params, x), model(masked, x), rtol=1e-5)

    statistics = sparsity.calibrate(model, params, [x], kind="squares")
    np.testing.assert_allclose(statistics["up",].squares, np.square(x).sum(0), rtol=1e-5)
    hidden = 2 * np.maximum(x @ params["up"].T, 0)
    np.testing.assert_allclose(statistics["down",].squares, np.square(hidden).sum(0), rtol=1e-5)


@pytest.mark.parametrize(("offset", "count"), [(2.0, 0), (1.0, 1)])
def test_the_entry_tells_the_constant_of_removed_channels(entries, params, offset, count):
    def divided(params, x):
        doubled = TWICE.bind(jnp.exp(x @ SWAP.bind(params["up"])))  # 2 exp(0) = 2
        return (1 / (doubled - offset)) @ params["down"]  # 1 / 0 times 0 is NaN

    assert len(sparsity.trace(divided, params, jnp.ones((5, 4))).groups) == count


def _dot(equation):
    (rows, _), (result,) = equation.inputs, equation.outputs
    return Product(
        kind="dot",
        lhs=Operand((1,), (0,)),
        rhs=Operand((0,), (1,)),
        output=((0, 0), (1, 1)),
        cost=((rows, 1), (result, 0), (result, 1)),
        pairs=((1, 0),),
    )


def test_a_product_of_ones_own_is_one_entry(monkeypatch, params):
    monkeypatch.setitem(PRODUCTS, "own_dot", _dot)
    x, filter_fn = jax.random.normal(jax.random.key(1), (5, 8)), lambda path, _: path == ("down",)

    def outputs(params, x):
        return DOT.bind(x, params["down"])

    statistics = sparsity.calibrate(outputs, params, [x], kind="gram", filter_fn=filter_fn)
    np.testing.assert_allclose(statistics["down",].gram, x.T @ x, rtol=1e-5)
    graph = sparsity.trace(outputs, params, x)
    assert graph.macs() == 5 * 8 * 3
    (row,) = (line.split() for line in graph.table().splitlines() if "down" in line)
    assert "dot" in row
