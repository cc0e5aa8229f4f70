"""Custom rules for derivatives, which users write for their functions, traced by jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from sparsity.core.trees import PyTree

Arrays: TypeAlias = list[jax.Array]
Types: TypeAlias = Sequence[jax.ShapeDtypeStruct | None]


def trace_rule(
    call: Callable[[Arrays], Arrays],
    inputs: Sequence[jax.ShapeDtypeStruct],
    floating_inputs: Types,
    floating_outputs: Types,
    maps_tangents: bool,
) -> PyTree:
    """Returns the jaxpr of the rule for derivatives of a call.

    The rule maps inputs and tangents to outputs and tangents, or inputs and cotangents of outputs
    to cotangents of inputs.

    Args:
      call: the call, which has a custom rule.
      inputs: the types of the inputs.
      floating_inputs: those of inputs that have derivatives; `None` for the others.
      floating_outputs: the types of outputs that have derivatives; `None` for the others.
      maps_tangents: whether the rule maps tangents; otherwise cotangents.

    Raises:
      Exception: whatever the rule raises, which is the user's code.
    """

    is_floating = [x is not None for x in floating_inputs]
    inputs_alone, outputs_alone = (
        [x for x in types if x is not None] for types in (floating_inputs, floating_outputs)
    )

    def split(arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the inputs that have derivatives, and the others."""
        pairs = list(zip(arrays, is_floating, strict=True))
        return [x for x, is_one in pairs if is_one], [x for x, is_one in pairs if not is_one]

    def call_floating(floating: Arrays, constants: Arrays) -> Arrays:
        """Returns the outputs that have derivatives."""
        queues = {True: iter(floating), False: iter(constants)}
        outputs = call([next(queues[is_one]) for is_one in is_floating])
        return [x for x, like in zip(outputs, floating_outputs, strict=True) if like is not None]

    def map_tangents(arrays: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        floating, constants = split(arrays)
        return jax.jvp(lambda *x: call_floating(list(x), constants), floating, tangents)

    def map_cotangents(arrays: Arrays, cotangents: Arrays) -> tuple[jax.Array, ...]:
        floating, constants = split(arrays)
        _, pull_back = jax.vjp(lambda *x: call_floating(list(x), constants), *floating)
        gradients: tuple[jax.Array, ...] = pull_back(cotangents)
        return gradients

    if maps_tangents:
        return jax.make_jaxpr(map_tangents)(inputs, inputs_alone)
    return jax.make_jaxpr(map_cotangents)(inputs, outputs_alone)
