"""What operations make of constants: how the second pass computes, without any array.

A result is used only if every implementation gives it: what numpy computes with the same bits, and
of functions that are rounded, values such as exp(0) = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from sparsity.programs.program import Equation, is_differentiable

_LARGEST = 1 << 16  # entries of a constant that are looked at

# Operations whose result numpy computes with the same bits.
_EXACT: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "conj": np.conj, "div": lambda one, other: _divided(one, other), "eq": np.equal,
    "floor": np.floor, "ge": np.greater_equal,
    "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal, "lt": np.less,
    "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal, "not": np.invert,
    "neg": np.negative, "or": np.bitwise_or, "real": np.real, "round": np.round, "sign": np.sign,
    "sqrt": np.sqrt, "square": np.square, "sub": np.subtract, "xor": np.bitwise_xor,
}  # fmt: skip
_SAME = frozenset((
    "convert_element_type", "copy", "copy_p", "device_put", "mesh_cast", "name", "pvary",
    "optimization_barrier", "reshard", "sharding_constraint", "stop_gradient",
))  # fmt: skip
_TELLS_NAN = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))
# Of these, only results that every implementation gives are used.
_ROUNDED: dict[str, Callable[..., Any]] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "cbrt": np.cbrt, "cos": np.cos, "cosh": np.cosh,
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
    "sinh": np.sinh, "tan": np.tan, "tanh": np.tanh, "pow": np.power, "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
}  # fmt: skip


def value(known: Any) -> float | None:
    """The one value of all entries of a constant, `None` if they differ or are not known."""
    dtype = getattr(known, "dtype", np.result_type(type(known)) if known is not None else None)
    if dtype is None or not isinstance(dtype, np.dtype) or np.size(known) > _LARGEST:
        return None
    entries = np.asarray(known).reshape(-1)
    if not entries.size or np.iscomplexobj(entries) or (entries != entries[0]).any():
        return None
    return _number(entries[0])


def result(equation: Equation, inputs: Sequence[float | None]) -> float | None:
    """The constant that an entry-by-entry operation makes of constants, `None` if not known."""
    name = equation.name
    if any(x is not None and x != x for x in inputs):
        return math.nan
    if name in ("mul", "and") and None in inputs:
        return product(*inputs)
    if name == "div" and inputs[0] == 0:
        return math.nan if inputs[1] == 0 else 0.0
    if name == "select_n":
        which, *cases = inputs
        if which is not None:
            return cases[int(which)]
        return cases[0] if all(c == cases[0] for c in cases) else None
    if None in inputs:
        return None
    if name in _SAME:
        return _cast(inputs[0], equation.outputs[0].dtype)
    arguments = [
        np.asarray(x).astype(v.dtype) for x, v in zip(inputs, equation.inputs, strict=True)
    ]
    if any(x.dtype.kind == "c" or (name == "round" and x % 1 == 0.5) for x in arguments):
        return None  # halves are rounded in two ways
    with np.errstate(all="ignore"):
        if name == "integer_pow":
            constant = _computed(lambda x: x ** equation.params["y"], arguments)
        elif name in _EXACT:
            constant = _computed(_EXACT[name], arguments)
        elif name in _ROUNDED:
            constant = float(_ROUNDED[name](*arguments))
            if constant not in (-1.0, 0.0, 0.5, 1.0) and math.isfinite(constant):
                return None
        else:
            return None
    # The sign of a 0 is not followed, so that the sign of its inverse is not known.
    by_zero = name in ("div", "rsqrt", "integer_pow", "pow") and math.isinf(constant or 0)
    return math.nan if by_zero else constant


def _computed(fn: Callable[..., Any], arguments: Sequence[np.ndarray]) -> float | None:
    """The result of a function; `None` where compilers may round it otherwise than numpy."""
    constant = _number(fn(*arguments))
    if arguments[0].dtype.kind in "fV" and arguments[0].dtype.itemsize < 4:
        # They may compute in a wider dtype: in bfloat16, 1 + 2**-9 - 1 is 0 or 2**-9.
        exact = float(fn(*(x.astype(np.float64) for x in arguments)))
        return constant if same(constant, exact) else None
    return constant


def _number(value: Any) -> float | None:
    """A value as a float, `None` if it is an integer that no float is equal to."""
    value = np.asarray(value).item()  # Python compares integers and floats exactly
    return float(value) if value != value or float(value) == value else None


def _divided(one: np.ndarray, other: np.ndarray) -> Any:
    """A quotient; of integers it is cut towards 0."""
    if one.dtype.kind not in "iu":
        return np.divide(one, other)
    return math.trunc(Fraction(int(one), int(other))) if other else math.nan


def _cast(known: float | None, dtype: Any) -> float | None:
    """A constant in another dtype, `None` where the result is not defined."""
    if known is None or np.dtype(dtype).kind not in "fbiuV":
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return float(int(known)) if limits.min <= known <= limits.max else None
    with np.errstate(over="ignore", under="ignore"):
        cast = float(np.asarray(known).astype(dtype))
    # A compiler may leave out a cast to a narrow dtype and back.
    return cast if np.dtype(dtype).itemsize >= 4 or cast == known else None


def product(one: float | None, other: float | None) -> float | None:
    """0 if one of them is, and the other is finite as far as it is known."""
    pair = (one, other)
    if any(x is not None and not math.isfinite(x) for x in pair):
        return math.nan
    if 0 in pair:
        return 0.0
    return None if None in pair else float(one or 0) * float(other or 0)


def summed(one: float | None, other: float | None) -> float | None:
    """A sum of products of these factors: their number is not known, so that only 0 stays."""
    factor = product(one, other)
    return factor if factor is None or factor == 0 or factor != factor else None


def neutral(name: str, dtype: Any) -> float | None:
    """What a reduction over removed entries leaves as it is; `None` if nothing does."""
    if name == "reduce_and":
        return -1.0 if jnp.issubdtype(dtype, jnp.signedinteger) else float(_limits(dtype).max)
    if name in ("reduce_max", "reduce_min"):
        limits = _limits(dtype)
        return float(limits.min if name == "reduce_max" else limits.max)
    return {"reduce_sum": 0.0, "reduce_prod": 1.0, "reduce_or": 0.0, "reduce_xor": 0.0}.get(name)


def tells_nan(equation: Equation) -> bool:
    """Whether an entry-by-entry operation makes a number of NaN."""
    return equation.name in _TELLS_NAN or not is_differentiable(equation.outputs[0])


def fill(equation: Equation) -> float | None:
    """What a gather puts where an index is out of range; `None` if it puts nothing there."""
    if equation.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return None
    dtype, value = equation.outputs[0].dtype, equation.params["fill_value"]
    if value is not None:
        return float(abs(value) if jnp.issubdtype(dtype, jnp.complexfloating) else value)
    if is_differentiable(equation.outputs[0]):
        return math.nan
    limits = _limits(dtype)
    return float(limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max)


def joined(name: str, constant: float) -> float | None:
    """What a reduction makes of equal entries."""
    if name in ("reduce_max", "reduce_min", "reduce_or", "reduce_and"):
        return constant
    if not math.isfinite(constant):
        return math.nan
    if (name, constant) in (("reduce_sum", 0), ("reduce_prod", 0), ("reduce_prod", 1)):
        return constant
    return None


class _Limits(NamedTuple):
    """The smallest and the largest value of a dtype."""

    min: float
    max: float


def _limits(dtype: Any) -> _Limits:
    if dtype == jnp.bool_:
        return _Limits(0, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        return _Limits(jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return _Limits(-math.inf, math.inf)


def same(one: float | None, other: float | None) -> bool:
    """Whether two constants are the same; NaN is NaN."""
    return one == other or (one is not None and other is not None and one != one and other != other)
