"""Entrywise primitives and reductions, and their results on constants, without any array.

Each primitive is one entry of `ENTRYWISE` or `REDUCTIONS`. A constant counts only if every
implementation returns the same bits: results of exact functions as numpy computes them, and values
of rounded functions such as exp(0) = 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike, DTypeLike

from sparsity.core.checks import is_traced
from sparsity.programs.program import Equation, is_differentiable

Scalar: TypeAlias = np.generic | np.ndarray | int | float
NumpyFunction: TypeAlias = Callable[..., Scalar]  # of numpy
# The constants of the inputs, `None` where unknown
InputConstants: TypeAlias = Sequence[float | None]
Fold: TypeAlias = Callable[[Equation, InputConstants], float | None]

_MAX_COMPARED_SIZE = 1 << 16  # entries of a constant that are compared
_TINY = 2.0**-126  # XLA:CPU flushes smaller numbers to 0


@dataclasses.dataclass(frozen=True)
class Entrywise:
    """A primitive whose output at a place depends on the entries of its inputs at that place.

    Attributes:
      fold: `fold(equation, constants)` returns the constant of the output for inputs that are not
        NaN, or `None` if the constant is uncertain. `fold_exactly(fn)` and `fold_rounded(fn)` make
        folds; copies need none.
      is_copy: whether the primitive returns its input, unchanged but for dtype or device.
      is_placement: whether the primitive is a copy to devices, whose parameters fit the shape of
        the input only.
      may_remove_nan: whether the primitive may turn NaN into a number, as comparisons do.
      reads_zero_sign: whether the output for 0.0 as the last input may differ from that for -0.0.
      keeps_any_zero: whether the output is 0 where one input is 0, unless another input is infinite
        or NaN; also for complex numbers, for which folds return `None`.
      keeps_zeros: whether the output is 0 where all inputs are 0, for complex numbers, too.
    """

    fold: Fold | None = None
    is_copy: bool = False
    is_placement: bool = False
    may_remove_nan: bool = False
    reads_zero_sign: bool = False
    keeps_any_zero: bool = False
    keeps_zeros: bool = False


def fold_exactly(compute: NumpyFunction) -> Fold:
    """Returns a fold by a function of numpy whose bits every implementation returns."""
    return functools.partial(_fold, compute, False)


def fold_rounded(compute: NumpyFunction) -> Fold:
    """Returns a fold by a function of numpy, to values that every implementation returns."""
    return functools.partial(_fold, compute, True)


@np.errstate(all="ignore")
def _fold(
    compute: NumpyFunction, is_rounded: bool, equation: Equation, inputs: InputConstants
) -> float | None:
    """Returns a function of constants, `None` if one is unknown or complex, or bits may differ."""
    dtypes = [np.dtype(value.dtype) for value in equation.inputs]
    if None in inputs or any(dtype.kind == "c" for dtype in dtypes):
        return None
    arguments = [np.asarray(x).astype(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    constant = _to_float(compute(*arguments))
    # A result that is not exact is rounded by each implementation in its own way.
    if is_rounded and constant not in (-1.0, 0.0, 0.5, 1.0) and math.isfinite(constant or 0):
        return None
    # Compilers may compute narrow floats in a wider dtype: in bfloat16, 1 + 2**-9 - 1 is 0 or
    # 2**-9. Those of ml_dtypes, such as bfloat16, have kind V.
    if is_rounded or (dtypes[0].kind in "fV" and dtypes[0].itemsize < 4):
        wide = _to_float(compute(*[x.astype(np.float64) for x in arguments]))
        return constant if is_same(constant, wide) else None
    return constant


def _fold_absorbing(compute: NumpyFunction) -> Fold:
    """Returns a fold by a function that is exact, and 0 if one input is 0."""
    fold = fold_exactly(compute)
    return lambda equation, inputs: (
        multiply_constants(*inputs) if None in inputs else fold(equation, inputs)
    )


def _divide(equation: Equation, inputs: InputConstants) -> float | None:
    if equation.inputs[0].dtype.kind in "iu":  # 0 / 0 is some number, not NaN
        return None
    if inputs[0] == 0:
        return math.nan if inputs[1] == 0 else 0.0
    return fold_exactly(np.divide)(equation, inputs)


def _select(equation: Equation, inputs: InputConstants) -> float | None:
    index, *cases = inputs
    if index is not None:
        return cases[int(index)] if 0 <= index < len(cases) else None
    return cases[0] if all(case == cases[0] for case in cases) else None


_EXACT: dict[str, NumpyFunction] = {
    "ceil": np.ceil, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "floor": np.floor, "max": np.maximum, "min": np.minimum, "not": np.invert,
    "or": np.bitwise_or, "sign": np.sign, "xor": np.bitwise_xor,
}  # fmt: skip
_COMPARISONS: dict[str, NumpyFunction] = {
    "eq": np.equal, "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
    "le": np.less_equal, "lt": np.less,
}  # fmt: skip
_ROUNDED: dict[str, NumpyFunction] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "cbrt": np.cbrt, "cos": np.cos, "cosh": np.cosh,
    "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "log2": np.log2,
    "one_minus_square": lambda x: (1 + x) * (1 - x), "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin, "sinh": np.sinh, "tan": np.tan, "tanh": np.tanh, "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
}  # fmt: skip
_COPIES = ("copy", "copy_p", "name", "optimization_barrier", "pvary", "stop_gradient")
_PLACEMENTS = ("device_put", "mesh_cast", "reshard", "sharding_constraint")
_WITHOUT_FOLD = (
    "bessel_i0e", "bitcast_convert_type", "clz", "digamma", "igamma", "igammac", "lgamma",
    "regularized_incomplete_beta", "zeta",
)  # fmt: skip
_KEEP_ZERO = (
    "bessel_i1e", "erf_inv", "population_count", "reduce_precision", "round", "shift_left",
    "shift_right_arithmetic", "shift_right_logical",
)  # fmt: skip

ENTRYWISE: dict[str, Entrywise] = {
    **{name: Entrywise(fold_exactly(compute)) for name, compute in _EXACT.items()},
    **{
        name: Entrywise(fold_exactly(compute), may_remove_nan=True)
        for name, compute in _COMPARISONS.items()
    },
    **{name: Entrywise(fold_rounded(compute)) for name, compute in _ROUNDED.items()},
    **{name: Entrywise(is_copy=True) for name in _COPIES},
    **{name: Entrywise(is_copy=True, is_placement=True) for name in _PLACEMENTS},
    **{name: Entrywise() for name in _WITHOUT_FOLD},
    # 0 if the first input is 0, whatever the other one is
    **{name: Entrywise(lambda _, x: 0.0 if x[0] == 0 else None) for name in _KEEP_ZERO},
    "abs": Entrywise(fold_exactly(np.abs), keeps_any_zero=True),
    "add": Entrywise(fold_exactly(np.add), keeps_zeros=True),
    "add_any": Entrywise(fold_exactly(np.add), keeps_zeros=True),
    "and": Entrywise(_fold_absorbing(np.bitwise_and)),
    "atan2": Entrywise(reads_zero_sign=True),
    "complex": Entrywise(keeps_zeros=True),
    "conj": Entrywise(fold_exactly(np.conj), keeps_any_zero=True),
    "convert_element_type": Entrywise(is_copy=True, keeps_any_zero=True),
    "div": Entrywise(_divide, reads_zero_sign=True),
    "exp": Entrywise(fold_rounded(np.exp)),
    "imag": Entrywise(keeps_any_zero=True),
    "integer_pow": Entrywise(
        lambda e, x: fold_rounded(lambda x: x ** e.params["y"])(e, x), reads_zero_sign=True
    ),
    "mul": Entrywise(_fold_absorbing(np.multiply), keeps_any_zero=True),
    "ne": Entrywise(fold_exactly(np.not_equal), may_remove_nan=True, keeps_zeros=True),
    "neg": Entrywise(fold_exactly(np.negative), keeps_any_zero=True),
    "nextafter": Entrywise(reads_zero_sign=True),
    "pow": Entrywise(fold_rounded(np.power), reads_zero_sign=True),
    "real": Entrywise(fold_exactly(np.real), keeps_any_zero=True),
    "rem": Entrywise(reads_zero_sign=True),
    "rsqrt": Entrywise(fold_rounded(lambda x: 1 / np.sqrt(x)), reads_zero_sign=True),
    "select_n": Entrywise(_select),
    "sqrt": Entrywise(fold_exactly(np.sqrt)),
    "square": Entrywise(fold_exactly(np.square), keeps_any_zero=True),
    "sub": Entrywise(fold_exactly(np.subtract), keeps_zeros=True),
}
# These make new entries, which no input holds.
SOURCES = frozenset((
    "iota", "random_bits", "random_clone", "random_fold_in", "random_seed", "random_split",
    "random_unwrap", "random_wrap", "rng_uniform", "threefry2x32",
))  # fmt: skip


def is_copy(equation: Equation) -> bool:
    """Returns whether an equation returns its only input, in another dtype or place at most."""
    entry = ENTRYWISE.get(equation.name)
    return entry is not None and entry.is_copy and len(equation.outputs) == 1


def find_uniform_value(array: ArrayLike | None) -> float | None:
    """Returns the one value of all entries of an array, `None` if they differ or are unknown."""
    if array is None or is_traced(array):
        return None
    dtype = getattr(array, "dtype", np.result_type(type(array)))
    if not isinstance(dtype, np.dtype) or np.size(array) > _MAX_COMPARED_SIZE:
        return None
    entries = np.asarray(array).reshape(-1)
    if not entries.size or np.iscomplexobj(entries) or (entries != entries[0]).any():
        return None
    return _to_float(entries[0])


def fold_constant(equation: Equation, inputs: InputConstants) -> float | None:
    """Returns the constant that an entrywise equation computes, `None` if it is uncertain."""
    rule = ENTRYWISE[equation.name]
    if any(x is not None and x != x for x in inputs):
        return math.nan
    if rule.is_copy:
        return _cast(inputs[0], equation.outputs[0].dtype)
    constant = None if rule.fold is None else rule.fold(equation, inputs)
    if any(0 < abs(x or 0) < _TINY for x in (*inputs, constant)):
        return None
    # The sign of a 0 is not followed, so that the sign of its inverse is not known.
    return math.nan if rule.reads_zero_sign and math.isinf(constant or 0) else constant


def may_remove_nan(equation: Equation) -> bool:
    """Returns whether an entrywise equation may turn NaN into a number."""
    return ENTRYWISE[equation.name].may_remove_nan or not is_differentiable(equation.outputs[0])


def reads_zero_sign(equation: Equation) -> bool:
    """Returns whether an entrywise equation returns other numbers for -0.0 than for 0.0."""
    return equation.name in ENTRYWISE and ENTRYWISE[equation.name].reads_zero_sign


def is_same(one: float | None, other: float | None) -> bool:
    """Returns whether two constants are equal; NaN equals NaN."""
    return one == other or (one is not None and other is not None and one != one and other != other)


def multiply_constants(one: float | None, other: float | None) -> float | None:
    """Returns the product of two constants: 0 if one is 0, unless the other is infinite or NaN."""
    pair = (one, other)
    if any(x is not None and not math.isfinite(x) for x in pair):
        return math.nan
    if 0 in pair:
        return 0.0
    return None if None in pair else float(one or 0) * float(other or 0)


def sum_constant_products(one: float | None, other: float | None) -> float | None:
    """Returns a sum of unknown length of products of two constants: only 0 stays 0."""
    factor = multiply_constants(one, other)
    return factor if factor is None or factor == 0 or factor != factor else None


def _to_float(value: Scalar) -> float | None:
    """Returns a value as a float, `None` for an integer that no float is equal to."""
    value = np.asarray(value).item()  # Python compares integers and floats exactly
    return float(value) if value != value or float(value) == value else None


def _cast(constant: float | None, dtype: DTypeLike) -> float | None:
    """Returns a constant in another dtype, `None` where the result is undefined."""
    if constant is None or np.dtype(dtype).kind not in "fbiuV":
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return float(int(constant)) if limits.min <= constant <= limits.max else None
    with np.errstate(over="ignore", under="ignore"):
        cast = float(np.asarray(constant).astype(dtype))
    # A compiler may leave out a cast to a narrow dtype and back.
    return cast if np.dtype(dtype).itemsize >= 4 or cast == constant else None


# Reductions.


def _repeat_only(*constants: float) -> Callable[[float], float | None]:
    """Returns a `repeat` that keeps these constants, and gives NaN for one that is not finite."""
    return lambda constant: (
        (constant if constant in constants else None) if math.isfinite(constant) else math.nan
    )


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A primitive that joins all entries along some axes.

    Attributes:
      neutral: returns the constant of a dtype that changes nothing, as 0 in a sum; `None` if
        entries cannot be removed.
      repeat: returns the reduction of entries that are all one constant, as 0 of zeros in a sum;
        `None` if it is uncertain.
    """

    neutral: Callable[[DTypeLike], float] | None = None
    repeat: Callable[[float], float | None] = _repeat_only()


def _find_limits(dtype: DTypeLike) -> tuple[float, float]:
    """Returns the smallest and the largest value of a dtype."""
    if dtype == jnp.bool_:
        return 0.0, 1.0
    if jnp.issubdtype(dtype, jnp.integer):
        return float(jnp.iinfo(dtype).min), float(jnp.iinfo(dtype).max)
    return -math.inf, math.inf


REDUCTIONS: dict[str, Reduction] = {
    "argmax": Reduction(),
    "argmin": Reduction(),
    "reduce_and": Reduction(  # all bits are 1
        lambda x: -1.0 if jnp.issubdtype(x, jnp.signedinteger) else _find_limits(x)[1], float
    ),
    "reduce_max": Reduction(lambda dtype: _find_limits(dtype)[0], float),
    "reduce_min": Reduction(lambda dtype: _find_limits(dtype)[1], float),
    "reduce_or": Reduction(lambda dtype: 0.0, float),
    "reduce_prod": Reduction(lambda dtype: 1.0, _repeat_only(0, 1)),
    "reduce_sum": Reduction(lambda dtype: 0.0, _repeat_only(0)),
    "reduce_xor": Reduction(lambda dtype: 0.0),
}


def repeat_constant(name: str, constant: float) -> float | None:
    """Returns the reduction of entries that are all one constant, `None` if it is uncertain."""
    return REDUCTIONS[name].repeat(constant) if name in REDUCTIONS else None


def read_gather_fill(equation: Equation) -> float | None:
    """Returns the constant of a gather where an index is out of range, `None` if there is none."""
    if equation.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return None
    dtype, value = equation.outputs[0].dtype, equation.params["fill_value"]
    if value is not None:
        return float(abs(value) if jnp.issubdtype(dtype, jnp.complexfloating) else value)
    if is_differentiable(equation.outputs[0]):
        return math.nan
    smallest, largest = _find_limits(dtype)
    return smallest if jnp.issubdtype(dtype, jnp.signedinteger) else largest
