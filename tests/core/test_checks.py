"""Checks of numbers, whose errors name the argument."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.core import checks


@pytest.mark.parametrize("check", [checks.check_fraction, checks.check_density])
def test_a_fraction_is_any_real_number_of_the_interval(check):
    for value in (1, 0.5, Fraction(1, 2), np.float16(0.5), np.array(0.5), jnp.bfloat16(0.5)):
        check("rate", value)


@pytest.mark.parametrize("check", [checks.check_fraction, checks.check_density])
@pytest.mark.parametrize(
    "value",
    [[[1], [1, 2]], jax.random.key(0), True, np.True_, "0.5", 10**400, None, 1j, [0.5], 1 + 1e-9],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_fraction_is_refused_by_the_name_of_its_argument(check, value):
    with pytest.raises(ValueError, match=r"^rate .*got rate = "):
        check("rate", value)
