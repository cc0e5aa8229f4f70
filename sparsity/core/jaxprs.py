"""The programs that jax traces: evaluated again, with a say in what their variables become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

__all__ = ["ClosedJaxpr", "Literal", "Var", "evaluate"]


def evaluate(
    closed: ClosedJaxpr,
    arguments: Sequence[jax.Array],
    define: Callable[[Var, Any], Any] = lambda var, value: value,
) -> list[Any]:
    """Runs a program equation by equation.

    Args:
      closed: the program, as `jax.make_jaxpr` returns it.
      arguments: one for each of its inputs.
      define: `define(variable, value)` returns what the variable becomes where an equation defines
        it; all that is computed later reads that. Inputs and constants stay as they are.

    Returns:
      The values of its outputs.

    Example:
      >>> import jax.numpy as jnp
      >>> double = jax.make_jaxpr(lambda x: x * 2)(1.0)
      >>> evaluate(double, [jnp.float32(3.0)], lambda var, value: value + 1)
      [Array(7., dtype=float32)]
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        bound = equation.primitive.get_bind_params(equation.params)
        functions, static = bound if isinstance(bound, tuple) else ((), bound)
        with equation.ctx.manager:
            outs = equation.primitive.bind(*functions, *map(read, equation.invars), **static)
        outs = outs if equation.primitive.multiple_results else [outs]
        for var, value in zip(equation.outvars, outs, strict=True):
            values[var] = define(var, value)
    return [read(var) for var in jaxpr.outvars]
