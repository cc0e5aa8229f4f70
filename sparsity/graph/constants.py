"""What operations make of constants: how the second pass computes, without any array.

A result is used only if every implementation gives it: what numpy computes with the same bits, and
of functions that are rounded, values such as exp(0) = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparsity.core.jaxprs import Equation

_LARGEST = 1 << 16  # entries of a constant that are looked at

# Operations whose result numpy computes with the same bits.
_EXACT: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "conj": np.conj, "div": np.divide, "eq": np.equal, "floor": np.floor, "ge": np.greater_equal,
    "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal, "lt": np.less,
    "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal, "not": np.invert,
    "neg": np.negative, "or": np.bitwise_or, "real": np.real, "round": np.round, "sign": np.sign,
    "sqrt": np.sqrt, "square": np.square, "sub": np.subtract, "xor": np.bitwise_xor,
}  # fmt: skip
_SAME = frozenset((
    "convert_element_type", "copy", "copy_p", "device_put", "mesh_cast", "name", "pvary",
    "optimization_barrier", "reduce_precision", "reshard", "sharding_constraint", "stop_gradient",
))  # fmt: skip
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
    return float(entries[0])


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
            found = float(arguments[0] ** equation.params["y"])
        elif name in _EXACT:
            found = float(_EXACT[name](*arguments))
        elif name in _ROUNDED:
            found = float(_ROUNDED[name](*arguments))
            if found not in (-1.0, 0.0, 0.5, 1.0) and math.isfinite(found):
                return None
        else:
            return None
    # The sign of a 0 is not followed, so that the sign of its inverse is not known.
    by_zero = name in ("div", "rsqrt", "integer_pow", "pow") and math.isinf(found)
    return math.nan if by_zero else found


def _cast(known: float | None, dtype: Any) -> float | None:
    """A constant in another dtype, `None` where the result is not defined."""
    if known is None or np.dtype(dtype).kind not in "fbiuV":
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return float(int(known)) if limits.min <= known <= limits.max else None
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(known).astype(dtype))


def product(one: float | None, other: float | None) -> float | None:
    """0 if one of them is, and the other is finite as far as it is known."""
    pair = (one, other)
    if any(x is not None and not math.isfinite(x) for x in pair):
        return math.nan
    if 0 in pair:
        return 0.0
    return None if None in pair else float(one or 0) * float(other or 0)


def joined(name: str, constant: float) -> float | None:
    """What a reduction makes of equal entries."""
    if name in ("reduce_max", "reduce_min", "reduce_or", "reduce_and"):
        return constant
    if not math.isfinite(constant):
        return math.nan
    if (name, constant) in (("reduce_sum", 0), ("reduce_prod", 0), ("reduce_prod", 1)):
        return constant
    return None


def same(one: float | None, other: float | None) -> bool:
    """Whether two constants are the same; NaN is NaN."""
    return one == other or (one is not None and other is not None and one != one and other != other)
