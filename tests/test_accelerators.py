"""Costs that are read from compiled programs, of programs whose costs are known."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sparsity
from benchmarks.accelerators import __main__ as cases, compiled
from benchmarks.accelerators.limits import LIMITS, Limits

X = jnp.ones((256, 256))  # 262,144 bytes


def read(fn, *args, is_update=False):
    return compiled.read(jax.jit(fn).lower(*args).compile().as_text(), is_update=is_update)


def test_a_fused_program_reads_its_arguments_and_writes_its_result():
    assert read(lambda x: jnp.tanh(x) * 2 + x, X) == compiled.Cost(1, 2 * X.nbytes)
    assert read(lambda x, y: (x + y) * jnp.exp(y), X, X) == compiled.Cost(1, 3 * X.nbytes)


def test_a_loop_of_at_most_one_trip_runs_in_an_update_alone():
    def step(x, is_update):
        def once(carry):
            return jnp.zeros_like(carry[0]), carry[1] * 2

        return lax.while_loop(lambda carry: carry[0], once, (is_update, x))[1]

    ordinary, update = (read(step, X, True, is_update=kind) for kind in (False, True))
    assert update.moved - ordinary.moved >= 2 * X.nbytes
    assert update.kernels > ordinary.kernels


def test_a_conditional_takes_the_cheap_branch_and_in_an_update_the_other():
    def step(x, is_update):
        return lax.cond(is_update, lambda x: jnp.sort(x, axis=0) + 1, lambda x: x, x)

    ordinary, update = (read(step, X, True, is_update=kind) for kind in (False, True))
    assert ordinary.moved < update.moved


def test_a_counted_loop_costs_its_trips():
    def repeat(trips):
        return read(lambda x: lax.fori_loop(0, trips, lambda _, x: jnp.sin(x) @ x, x), X)

    assert repeat(8).kernels - repeat(4).kernels == 4 * (repeat(5).kernels - repeat(4).kernels)


def test_slices_count_in_place_of_their_arrays():
    def write(x, row, i):
        return lax.dynamic_update_slice(x, row, (i, 0))

    step = jax.jit(write, donate_argnums=0)
    text = step.lower(X, X[:1], 3).compile().as_text()
    assert compiled.read(text, is_update=False).moved < X.nbytes / 10


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("f32[2,3]{1,0}", 24),
        ("(bf16[4], s4[3]{0}, pred[])", 8 + 2 + 1),
        ("u8[128]{0:T(128)S(1)}", 0),  # in the memory of a TPU's core
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, nbytes):
    assert compiled.count_bytes(shape) == nbytes


def test_limits_are_of_cases_that_the_command_can_compile():
    for device, tree, layout, algorithm in LIMITS:
        assert (device, tree) in itertools.product(cases.DEVICES, cases.TREES)
        assert layout in cases.LAYOUTS
        assert algorithm.partition(", ")[0] in sparsity.all_algorithm_names()
    assert {*Limits._fields} <= {*cases.Figures._fields}
