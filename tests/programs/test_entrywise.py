"""Constants that entrywise equations fold, against the results of jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from sparsity.programs import entrywise
from sparsity.programs.program import read_jaxpr


def fold(fn, *constants, dtype=jnp.float32):
    """Folds the one equation of a function of constants."""
    (equation,) = read_jaxpr(
        jax.make_jaxpr(fn)(*(dtype(x or 0) for x in constants))
    ).flat_equations()
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
        (lax.exp2, [3.0]),  # exact in numpy, and not in each compiler
        (lax.cbrt, [27.0]),
        (lax.pow, [2.0, 3.0]),
        (lax.round, [2.5]),  # to 2 or to 3
    ],
)
def test_a_constant_that_implementations_compute_differently_is_uncertain(fn, constants):
    assert fold(fn, *constants) is None


def test_a_value_of_narrow_dtypes_is_uncertain_unless_no_rounding_makes_it():
    assert fold(lax.acosh, 1.5, dtype=jnp.float8_e5m2) is None  # 0.96 by mathematics
    assert fold(lax.exp, 0.0, dtype=jnp.float8_e5m2) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_sum_that_a_narrow_dtype_rounds_is_uncertain(dtype):
    # Compilers may compute the sum in float32, which holds it.
    assert fold(lax.add, 1.0, 2.0**-12, dtype=dtype) is None
    assert fold(lax.add, 1.0, 0.5, dtype=dtype) == 1.5
    assert fold(lax.add, 1.0, 2.0**-24) == 1  # in float32


@pytest.mark.parametrize("which", [-1, 3])
def test_a_choice_out_of_range_is_uncertain(which):
    def choose(*cases):
        return lax.select_n(jnp.int32(0), *cases)

    equation = list(read_jaxpr(jax.make_jaxpr(choose)(1.0, 2.0, 3.0)).flat_equations())[-1]
    assert entrywise.fold_constant(equation, [which, 1.0, 2.0, 3.0]) is None
    assert entrywise.fold_constant(equation, [2, 1.0, 2.0, 3.0]) == 3


def test_constants_that_are_certain_stay():
    assert fold(lax.tanh, 0.0) == 0
    assert fold(lax.exp, -1e9) == 0
    assert fold(lambda x: lax.integer_pow(x, 3), 1.0) == 1
    assert fold(lax.mul, 2.0, 3.0) == 6


UNARY = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cbrt", "ceil", "cos",
    "cosh", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "log", "log1p",
    "logistic", "neg", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
]  # fmt: skip
BINARY = ["add", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "pow", "sub"]
NUMBERS = np.array([-np.inf, -3, -1, -0.5, 0, 0.5, 1, 2, 1e30, np.inf], np.float32)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_constants_are_the_results_of_jax(name):
    fn = getattr(lax, name)
    grids = np.meshgrid(*[NUMBERS] * (1 + (name in BINARY)), indexing="ij")
    arguments = [grid.ravel() for grid in grids]
    (equation,) = read_jaxpr(jax.make_jaxpr(fn)(*arguments)).flat_equations()
    folded = [
        entrywise.fold_constant(equation, [float(x) for x in row])
        for row in zip(*arguments, strict=True)
    ]
    for *row, constant, result in zip(*arguments, folded, np.asarray(fn(*arguments)), strict=True):
        # NaN says that a result depends on what constants do not tell, as the sign of a 0.
        assert constant is None or constant != constant or constant == result, row
    assert any(constant is not None and constant == constant for constant in folded)


NAMED = {  # of other versions of jax, or by operators alone: constants, results by hand
    "add_any": [([2, 3], 5)],
    "and": [([6, 3], 2), ([None, 0], 0)],
    "clamp": [([1, 0, 4], 1), ([1, 2, 4], 2), ([1, 7, 4], 4)],
    "log2": [([1], 0), ([0], -np.inf), ([2], 1), ([8], None)],
    "not": [([5], -6)],
    "one_minus_square": [([0], 1), ([1], 0), ([-1], 0), ([2], None), ([None], None)],
    "or": [([6, 3], 7)],
    "population_count": [([0], 0), ([3], None)],
    "real": [([3], 3)],
    "reduce_precision": [([0], 0), ([1], None), ([None], None)],
    "shift_left": [([0, None], 0), ([1, 2], None)],
    "shift_right_arithmetic": [([0, 40], 0), ([None, 0], None)],
    "shift_right_logical": [([0, 1], 0)],
    "xor": [([6, 3], 5)],
}


@pytest.mark.parametrize("name", NAMED)
def test_primitives_of_other_versions_fold_to_results_by_hand(name):
    is_bitwise = name.startswith("shift") or name in ("and", "not", "or", "population_count", "xor")
    dtype = np.int32 if is_bitwise else np.float32
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, *_: x)
    for constants, result in NAMED[name]:
        arguments = [dtype(0)] * len(constants)
        (equation,) = read_jaxpr(jax.make_jaxpr(primitive.bind)(*arguments)).flat_equations()
        assert entrywise.fold_constant(equation, constants) == result, constants


def test_values_that_every_implementation_returns_are_those_of_rounded_functions():
    assert [fold(lax.exp2, x) for x in (-1.0, 0.0)] == [0.5, 1]
    assert [fold(lax.cos, 0.0), fold(lax.logistic, 0.0)] == [1, 0.5]
    assert [fold(lax.log, x) for x in (0.0, 1.0)] == [-np.inf, 0]
    assert fold(lax.asin, 1.0) is None
    assert [fold(lax.sqrt, 9.0), fold(lax.round, 0.0)] == [3, 0]


def test_a_product_with_0_is_0_unless_the_other_factor_may_be_infinite():
    infinite = np.inf
    multiply = entrywise.multiply_constants
    assert [multiply(0, None), multiply(None, 0), multiply(0, 5.0), multiply(2.0, 3.0)] == [
        0,
        0,
        0,
        6,
    ]
    assert multiply(2.0, None) is None
    assert multiply(None, None) is None
    for one, other in ((0, infinite), (infinite, None), (None, np.nan), (-infinite, 1)):
        assert np.isnan(multiply(one, other))
    add_up = entrywise.sum_constant_products
    assert [add_up(0, None), add_up(3.0, 0)] == [0, 0]
    assert [add_up(1, 1), add_up(2.0, None)] == [None, None]
    assert np.isnan(add_up(infinite, 1))


@pytest.mark.parametrize(
    ("dtype", "kept", "lost"),
    [
        (jnp.int8, [-128, 0, 127, 1.5], [-129, 128, np.inf]),
        (jnp.uint8, [0, 255], [-1, 256]),
        (jnp.bfloat16, [0.5, 256.0, np.inf], [0.1, 257.0]),
        (jnp.complex64, [], [0.0, 1.0]),
    ],
)
def test_a_cast_keeps_constants_that_the_dtype_holds(dtype, kept, lost):
    def cast(constant):
        return fold(lambda x: lax.convert_element_type(x, dtype), constant)

    assert [cast(constant) for constant in kept] == [
        float(np.asarray(constant).astype(dtype)) for constant in kept
    ]
    assert [cast(constant) for constant in lost] == [None] * len(lost)


def test_a_constant_is_the_one_value_of_an_array_of_up_to_65536_entries():
    assert entrywise.find_uniform_value(np.full((256, 256), 3.0)) == 3
    assert entrywise.find_uniform_value(np.full(256 * 256 + 1, 3.0)) is None
    assert entrywise.find_uniform_value(2) == 2
    assert entrywise.find_uniform_value(np.bool_(True)) == 1
    assert entrywise.find_uniform_value(2**53 + 1) is None  # no float is equal to it
    for array in (None, np.array([1, 2]), np.array([2, 1, 2]), np.zeros(0), np.ones(2, complex)):
        assert entrywise.find_uniform_value(array) is None
    seen = []
    jax.jit(lambda x: seen.append(entrywise.find_uniform_value(x)))(np.ones(2))
    assert seen == [None]


def test_reductions_of_one_constant_are_those_of_any_number_of_entries():
    repeat = entrywise.repeat_constant
    for name, kept in {
        "reduce_sum": [0.0],
        "reduce_prod": [0.0, 1.0],
        "reduce_max": [-1.0, 0.0, 1.0, 2.0],
        "reduce_min": [-1.0, 0.0, 1.0, 2.0],
        "reduce_xor": [],
        "cumsum": [],
    }.items():
        assert [x for x in (-1.0, 0.0, 1.0, 2.0) if repeat(name, x) is not None] == kept, name
        assert all(repeat(name, x) == x for x in kept)
    assert repeat("reduce_max", -np.inf) == -np.inf
    for name in ("reduce_sum", "reduce_prod", "reduce_xor"):
        assert np.isnan(repeat(name, np.inf))
    assert repeat("reduce_or", 1.0) == repeat("reduce_and", 1.0) == 1


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (jnp.float32, np.nan), (jnp.complex64, np.nan), (jnp.int8, -128), (jnp.uint8, 255),
        (jnp.bool_, 1),
    ],
)  # fmt: skip
def test_a_lookup_out_of_range_gives_the_fill_value_of_its_mode(dtype, fill):
    x = jnp.zeros(3, dtype)

    def gather_fill(**options):
        program = read_jaxpr(jax.make_jaxpr(lambda x: x.at[jnp.array([5])].get(**options))(x))
        (gather,) = [equation for equation in program.flat_equations() if equation.name == "gather"]
        return entrywise.read_gather_fill(gather)

    np.testing.assert_array_equal(gather_fill(mode="fill"), float(fill))
    np.testing.assert_array_equal(x.at[jnp.array([5])].get(mode="fill"), np.asarray([fill], dtype))
    assert gather_fill(mode="fill", fill_value=1) == 1
    assert gather_fill(mode="clip") is None
