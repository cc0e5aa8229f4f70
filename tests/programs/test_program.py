"""Programs evaluated equation by equation compute what the function computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.calibration import reuse
from sparsity.programs.products import read_product
from sparsity.programs.program import read_jaxpr
from sparsity.programs.walk import Interpreter


@jax.jit
def _compiled(x):
    return jnp.tanh(x) * 2 + jnp.roll(x, 1)


@jax.custom_jvp
def _clipped(x):
    return jnp.minimum(x, 1.0) ** 2


@_clipped.defjvp
def _clipped_jvp(primals, tangents):
    return _clipped(*primals), 7 * tangents[0]  # not its derivative: the rule must be used


@jax.custom_vjp
def _backward(x):
    return jnp.sin(x)


_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (5 * g + 0 * x,))


def _cond(x):
    return jax.lax.cond(x[0] > 0, lambda x: x * 3, lambda x: x - 1, x)


def _switch(x):
    return jax.lax.switch(jnp.int32(x.size) - 1, [jnp.sin, jnp.cos, lambda x: x * x], x)


def _scan(x):
    return jax.lax.scan(lambda c, y: (c * 0.5 + y, c), x, jnp.stack([x, 2 * x]))


def _while(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2 + 1, jnp.abs(x))


_TABLE = jnp.array([4.0, 5.0, 6.0])
_PROGRAMS = {
    "arithmetic": lambda x: (x * 2 + 1) / 3,
    "jit": _compiled,
    "jit in jit": jax.jit(lambda x: _compiled(x) + _compiled(x + 1)),
    "cond": _cond,
    "switch": _switch,
    "scan": _scan,
    "while": _while,
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i * x, x),
    "custom_jvp": _clipped,
    "custom_vjp": _backward,
    "relu": jax.nn.relu,
    "vmap": jax.vmap(lambda x: jnp.where(x > 0, x, -1.0)),
    "constants": lambda x: x + _TABLE,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "an input, a literal and a result twice": lambda x: (x, 1.0, x * 2, x * 2, jnp.zeros(2)),
    "several results": lambda x: jnp.split(x, [1]),
}
_X = jnp.array([0.5, -1.5, 2.5])


class _Outer(Interpreter):
    """Runs the equations of a program, calls and loops each as one."""

    def __init__(self, define):
        self.define = define

    def call(self, equation, inputs):
        return self.bind(equation, inputs)

    def enters(self, equation):
        return False


def _evaluate(program, x, define=lambda value, array: array):
    return _Outer(define).run(program, [x])


@pytest.mark.slow
@pytest.mark.parametrize("name", _PROGRAMS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_a_program_evaluates_to_the_function(name, wrap):
    program = read_jaxpr(jax.make_jaxpr(_PROGRAMS[name])(_X))
    outputs = wrap(lambda x: _evaluate(program, x))(_X)
    expected = jax.tree.leaves(_PROGRAMS[name](_X))
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp", "jit", "cond", "scan", "relu"])
def test_gradients_go_through_with_the_rules_of_the_function(name):
    def total(fn):
        return lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fn(x)))

    program = read_jaxpr(jax.make_jaxpr(_PROGRAMS[name])(_X))
    grads = jax.grad(total(lambda x: _evaluate(program, x)))(_X)
    np.testing.assert_allclose(grads, jax.grad(total(_PROGRAMS[name]))(_X), rtol=1e-6)
    if name == "custom_jvp":
        np.testing.assert_array_equal(grads, [7, 7, 7])


@pytest.mark.slow
def test_the_program_is_mapped_as_the_function_is():
    xs = jnp.stack([_X, -_X])
    program = read_jaxpr(jax.make_jaxpr(_cond)(_X))
    (outputs,) = jax.vmap(functools.partial(_evaluate, program))(xs)
    np.testing.assert_array_equal(outputs, jax.vmap(_cond)(xs))


def test_what_a_variable_becomes_is_read_by_all_that_follows():
    def fn(x):
        first = x + 1
        return first, first * 10, x * 3

    program = read_jaxpr(jax.make_jaxpr(fn)(2.0))
    chosen = program.outputs[0]
    outputs = _evaluate(
        program, jnp.float32(2), lambda value, array: array + 4 if value is chosen else array
    )
    # first = 3 + 4; then 70; the third does not depend on it.
    assert list(map(float, outputs)) == [7, 70, 6]


def test_inputs_and_constants_are_not_redefined():
    program = read_jaxpr(jax.make_jaxpr(lambda x: (x, x + _TABLE))(_X))
    seen = []

    def define(value, array):
        seen.append(value)
        return array * 0

    same, total = _evaluate(program, _X, define)
    np.testing.assert_array_equal(same, _X)
    np.testing.assert_array_equal(total, [0, 0, 0])
    assert seen == [program.outputs[1]]


def test_each_variable_of_the_outer_program_is_defined_once_and_in_order():
    program = read_jaxpr(jax.make_jaxpr(lambda x: _compiled(_cond(x)) + 1)(_X))
    seen = []
    _evaluate(program, _X, lambda value, array: (seen.append(value), array)[1])
    assert seen == [value for equation in program.equations for value in equation.outputs]


def test_functions_of_one_text_and_equal_constants_reuse_a_program(monkeypatch):
    compiled = {}
    monkeypatch.setattr(reuse, "_COMPILED", compiled)

    def add(constant):
        x = jnp.arange(constant.size, dtype=jnp.float32)
        result = reuse.compile_or_reuse(lambda x: x + jnp.asarray(constant), x)(x)
        np.testing.assert_array_equal(result, np.arange(constant.size) + constant)
        return len(compiled)

    small, large = np.arange(4, dtype=np.float32), np.ones(2**15, np.float32)
    assert [add(small), add(small), add(2 * small)] == [1, 1, 2]
    assert add(large) == 2  # a key of many bytes would cost more than it saves


def test_programs_of_functions_that_hold_arrays_or_call_back_are_not_mixed_up():
    x = jnp.arange(3, dtype=jnp.float32)
    for number in (1.0, 2.0):
        held = jnp.full(3, number)

        def multiply(x, held=held):
            return jax.jit(lambda x: x * held)(x)

        np.testing.assert_array_equal(reuse.compile_or_reuse(multiply, x)(x), x * number)

        def call(x, number=number):
            return jax.pure_callback(lambda x: np.asarray(x) * number, x, x)

        np.testing.assert_array_equal(reuse.compile_or_reuse(call, x)(x), x * number)


def test_the_oldest_program_makes_room(monkeypatch):
    compiled = {}
    monkeypatch.setattr(reuse, "_COMPILED", compiled)
    monkeypatch.setattr(reuse, "_MAX_PROGRAMS", 2)
    keys = []
    for factor in (2.0, 3.0, 4.0):
        reuse.compile_or_reuse(functools.partial(jnp.multiply, factor), jnp.float32(1))
        keys.append(list(compiled)[-1])
    assert list(compiled) == keys[1:]


def test_a_program_that_the_first_call_compiles_serves_one_type_of_arrays(monkeypatch):
    monkeypatch.setattr(reuse, "_COMPILED", compiled := {})
    add = reuse.compile_at_call(lambda x, y: x + y)
    for shape in ((2,), (3,), (2,)):
        np.testing.assert_array_equal(add(jnp.ones(shape), jnp.float32(1)), np.full(shape, 2))
    assert len(compiled) == 2


@pytest.mark.parametrize("rule", [_clipped, _backward], ids=["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2,)], ids=str)
def test_rules_for_derivatives_are_programs_at_every_shape(rule, shape):
    x = jnp.full(shape, 0.5)
    (equation,) = read_jaxpr(jax.make_jaxpr(rule)(x)).equations
    outputs = Interpreter().run(equation.rule, [x, jnp.ones(shape)])
    if equation.maps_tangents:
        np.testing.assert_array_equal(outputs[1], 7 * np.ones(shape))
    else:
        np.testing.assert_array_equal(outputs[0], jax.grad(lambda x: rule(x).sum())(x))


def test_axes_of_a_product_know_their_partners_and_their_places():
    """Rows [batch, rows, inputs] meet [inputs, outputs, batch]; images [8 channels] 2 groups."""
    x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5, 2))
    image, kernel = jnp.ones((1, 8, 6)), jnp.ones((10, 4, 3))

    def model(x, w, image, kernel):
        dots = jax.lax.dot_general(x, w, (((2,), (0,)), ((0,), (2,))))
        convolved = jax.lax.conv_general_dilated(image, kernel, (1,), "SAME", feature_group_count=2)
        return dots, convolved

    program = read_jaxpr(jax.make_jaxpr(model)(x, w, image, kernel))
    dot, convolution = map(read_product, program.flat_equations())
    assert [dot.map_paired_axes(i) for i in range(2)] == [{2: 0, 0: 2}, {0: 2, 2: 0}]
    assert [dot.map_result_axes(i) for i in range(2)] == [{0: 0, 1: 1}, {0: 2, 2: 1}]
    # An output channel meets the 4 channels of its group, which are some of the image's.
    assert [convolution.map_paired_axes(i) for i in range(2)] == [{1: 1}, {1: 1, 0: 1}]
    assert [convolution.map_result_axes(i) for i in range(2)] == [{0: 0}, {1: 0}]
