"""Constants that entrywise equations fold, against the results of jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparsity.programs import entrywise
from sparsity.programs.program import read_jaxpr


def fold(fn, *constants, dtype=jnp.float32):
    """Folds the one equation of a function of constants."""
    (equation,) = read_jaxpr(jax.make_jaxpr(fn)(*(dtype(x or 0) for x in constants))).flat()
    return entrywise.fold_constant(equation, constants)


@pytest.mark.parametrize(
    ("fn", "constants"),
    [
        (lambda x: lax.integer_pow(x, 5), [0.1]),  # a product of several, rounded in some order
        (lambda x: lax.integer_pow(x, -3), [3.0]),
        (lax.tanh, [10.0]),  # 1 in float32 alone
        (lax.logistic, [20.0]),
        (lax.max, [0.0, 2.0**-149]),  # 0 where subnormal numbers are flushed
        (lax.mul, [2.0**-100, 2.0**-100 * 2.0**60]),
        (lax.sign, [2.0**-149]),
    ],
)
def test_a_constant_that_implementations_compute_differently_is_uncertain(fn, constants):
    assert fold(fn, *constants) is None


def test_a_value_of_narrow_dtypes_is_uncertain_unless_no_rounding_makes_it():
    assert fold(lax.acosh, 1.5, dtype=jnp.float8_e5m2) is None  # 0.96 by mathematics
    assert fold(lax.exp, 0.0, dtype=jnp.float8_e5m2) == 1


@pytest.mark.parametrize("which", [-1, 3])
def test_a_choice_out_of_range_is_uncertain(which):
    def choose(*cases):
        return lax.select_n(jnp.int32(0), *cases)

    equation = list(read_jaxpr(jax.make_jaxpr(choose)(1.0, 2.0, 3.0)).flat())[-1]
    assert entrywise.fold_constant(equation, [which, 1.0, 2.0, 3.0]) is None
    assert entrywise.fold_constant(equation, [2, 1.0, 2.0, 3.0]) == 3


def test_constants_that_are_certain_stay():
    assert fold(lax.tanh, 0.0) == 0
    assert fold(lax.exp, -1e9) == 0
    assert fold(lambda x: lax.integer_pow(x, 3), 1.0) == 1
    assert fold(lax.mul, 2.0, 3.0) == 6


def test_integers_divide_as_jax_divides_them():
    assert fold(lax.div, 0, None, dtype=np.int32) is None  # -1 by 0
    assert fold(lax.div, 0, 3, dtype=np.int32) == 0
    assert fold(lax.div, -7, 2, dtype=np.int32) == -3
    assert fold(lax.div, -128, -1, dtype=np.int8) == -128
