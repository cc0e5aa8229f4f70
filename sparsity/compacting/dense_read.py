"""Equations that read kept values as dense arrays, and their derivatives.

The `bind` of a `DenseRead` has a rule for derivatives:

- Forward: `_bind_dense` makes the pending inputs dense and binds the equation.
- Backward: `_backward` differentiates `_bind_dense`, first by the pending operand of a product,
  then by the other inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sparsity.compacting.deferred import (
    Deferred,
    MaybePending,
    densify_pending,
    is_pending,
    make_token,
)
from sparsity.compacting.formats.base import KeptArray, KeptProduct
from sparsity.core import sharding
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation, is_differentiable

Arrays: TypeAlias = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class DenseRead:
    """Equation that reads pending arrays as dense ones, with a rule for derivatives.

    One dense array of the size of a parameter exists at a time, and none between the passes: the
    forward pass stores the inputs as they are. The backward pass of a product first computes the
    gradient of the pending operand. Its dense form is gone when the operand is made dense again for
    the gradient of the other one.

    Attributes:
      equation: the equation.
      structure: structure of the inputs, whose leaves are the arrays of the methods.
      one_at_a_time: whether dense parameters wait for other arrays.
    """

    equation: Equation
    structure: jax.tree_util.PyTreeDef
    one_at_a_time: bool

    def bind(self, arrays: Sequence[jax.Array]) -> Arrays:
        """Returns the outputs of the equation, with the rule for derivatives."""
        bind = jax.custom_vjp(self._forward)
        bind.defvjp(self._save, self._backward)
        return list(bind(*sharding.vary_alike(arrays)))

    def _forward(self, *arrays: jax.Array) -> Arrays:
        """Returns the outputs; dense parameters wait for the inputs that are dense already."""
        dense = [x for x in self._inputs(arrays) if not isinstance(x, KeptArray | Deferred)]
        return self._bind_dense(arrays, dense)

    def _bind_dense(self, arrays: Sequence[jax.Array], after: Arrays) -> Arrays:
        """Makes pending inputs dense, and binds the equation; has jax's own derivatives.

        Args:
          arrays: the leaves of the inputs.
          after: arrays for which the dense parameters wait if `one_at_a_time`.
        """
        inputs, token = self._inputs(arrays), make_token(after) if self.one_at_a_time else 0
        return self.equation.bind([densify_pending(x, token) for x in inputs])

    def _save(self, *arrays: jax.Array) -> tuple[Arrays, Sequence[jax.Array]]:
        """Returns the outputs, and the arrays for `_backward`.

        `jax.vjp` replaces a call with its own rule for reverse derivatives by the forward pass of
        this rule, which has forward derivatives. The call has none: with `_forward`, forward
        derivatives of gradients, as in a Hessian, would be an error of jax.
        """
        if self.equation.name == "custom_vjp_call":
            return jax.vjp(self._forward, *arrays)[0], arrays
        return self._forward(*arrays), arrays

    def _backward(self, arrays: Arrays, cotangents: Arrays) -> tuple[jax.Array | None, ...]:
        """Returns the gradients of the arrays, `None` for integers.

        Of a product, the gradient of the pending operand comes first: the other gradient waits.
        """
        cotangents, inputs = self._floats(cotangents), self._inputs(arrays)
        pending, dense = _split_float_leaves(inputs)
        if self.equation.name in PRODUCTS and sum(map(is_pending, inputs)) == 1:
            gradients = self._differentiate(arrays, pending, cotangents, after=cotangents)
            # The second dense array is not made before the gradient by the first is computed.
            after = [*gradients.values()] or cotangents
            gradients |= self._differentiate(arrays, dense, cotangents, after)
        else:
            gradients = self._differentiate(arrays, pending + dense, cotangents, after=cotangents)
        return tuple(gradients.get(index) for index in range(len(arrays)))

    def _differentiate(
        self, arrays: Arrays, indices: list[int], cotangents: Arrays, after: Arrays
    ) -> dict[int, jax.Array]:
        """Returns the gradients of the arrays at these indices, by index; see `_bind_dense`."""

        def bind_replaced(*chosen: jax.Array) -> Arrays:
            replaced = dict(zip(indices, chosen, strict=True))
            replaced_arrays = [replaced.get(index, array) for index, array in enumerate(arrays)]
            return self._floats(self._bind_dense(replaced_arrays, after))

        if not indices:
            return {}
        pull_back = jax.vjp(bind_replaced, *(arrays[index] for index in indices))[1]
        return dict(zip(indices, pull_back(cotangents), strict=True))

    def _inputs(self, arrays: Sequence[jax.Array]) -> list[MaybePending]:
        """Returns the inputs of the equation, whose leaves are the arrays."""
        return jax.tree.unflatten(self.structure, arrays)

    def _floats(self, outputs: Arrays) -> Arrays:
        """Returns the outputs, or their gradients, that have derivatives."""
        pairs = zip(self.equation.outputs, outputs, strict=True)
        return [x for value, x in pairs if is_differentiable(value)]


def find_kept_product(equation: Equation, inputs: Sequence[MaybePending]) -> KeptProduct | None:
    """Returns a product of kept values and a dense array, `None` for other equations."""
    if equation.name not in PRODUCTS or len(inputs) != 2:
        return None
    at = 0 if is_pending(inputs[0]) else 1
    kept, other = inputs[at], inputs[1 - at]
    if not isinstance(kept, KeptArray) or isinstance(other, KeptArray | Deferred):
        return None
    return KeptProduct(equation, at, kept, other)


def _split_float_leaves(inputs: Sequence[MaybePending]) -> tuple[list[int], list[int]]:
    """Returns the indices of the leaves that are floats: of pending arrays, and of dense ones."""
    arrays = [(array, is_pending(each)) for each in inputs for array in jax.tree.leaves(each)]
    floats = [(i, x) for i, (y, x) in enumerate(arrays) if jnp.issubdtype(y.dtype, jnp.inexact)]
    return [i for i, x in floats if x], [i for i, x in floats if not x]
