"""Compiled programs that functions of one text share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding
from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree
from sparsity.programs.program import jaxpr_as_fun

Arrays: TypeAlias = Sequence[jax.Array]

_COMPILED: dict[tuple[str, ...], Callable[..., Arrays]] = {}  # by text and constants
_MAX_PROGRAMS = 256  # programs; then the oldest is dropped
_MAX_CONSTANT_BYTES = 1 << 16  # of a constant; programs with larger ones are not shared


def compile_or_reuse(fn: Callable[..., PyTree], *args: PyTree) -> Callable[..., PyTree]:
    """Compiles a function, or reuses the program of a function that traced to the same text.

    The result is not for derivatives: the text names no custom rule for them.

    Args:
      fn: function of arrays; results that do not depend on `args` are returned as they are.
      *args: arguments of the shapes and dtypes of later calls. If one is traced, or lies on a mesh
        with Explicit axes, the result is `fn` itself.

    Example:
      >>> import jax.numpy as jnp
      >>> double = compile_or_reuse(lambda x: (x * 2, "text"), jnp.float32(1.0))
      >>> double(jnp.float32(3.0))
      (Array(6., dtype=float32), 'text')
    """
    leaves = jax.tree.leaves(args)
    if any(is_traced(x) or sharding.explicit_sharding(jax.typeof(x)) for x in leaves):
        return fn
    results: list[object] = []
    structure: list[jax.tree_util.PyTreeDef] = []

    def run_flat(*args: PyTree) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(fn(*args))
        results[:] = [None if is_traced(x) else x for x in leaves]
        structure[:] = [treedef]
        return [x for x in leaves if is_traced(x)]

    closed = jax.make_jaxpr(run_flat)(*args)
    key = _make_key(closed)
    compiled = _COMPILED.get(key) if key is not None else None
    if compiled is None:
        compiled = jax.jit(jaxpr_as_fun(closed))
    if key is not None and key not in _COMPILED:
        if len(_COMPILED) >= _MAX_PROGRAMS:
            _COMPILED.pop(next(iter(_COMPILED)), None)
        _COMPILED[key] = compiled

    def call(*args: PyTree) -> PyTree:
        outputs = iter(compiled(*jax.tree.leaves(args)))
        leaves = [next(outputs) if x is None else x for x in results]
        return jax.tree.unflatten(structure[0], leaves)

    return call


def compile_at_call(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function that is compiled at its first call for each type of its arrays.

    Calls must be alike in all but arrays. `compile_or_reuse` compiles functions of equal text once.

    Example:
      >>> add = compile_at_call(lambda x, y: x + y)
      >>> add(jnp.float32(1.0), jnp.float32(2.0)), add(jnp.float32(3.0), jnp.float32(4.0))
      (Array(3., dtype=float32), Array(7., dtype=float32))
    """
    compiled: dict[tuple[object, ...], Callable[..., PyTree]] = {}

    def call(*args: PyTree) -> PyTree:
        types = tuple(map(jax.typeof, jax.tree.leaves(args)))
        if types not in compiled:
            compiled[types] = compile_or_reuse(fn, *args)
        return compiled[types](*args)

    return call


def _make_key(closed: PyTree) -> tuple[str, ...] | None:
    """Returns what tells a traced function from others; `None` if only the function itself does."""
    arrays = _list_constants(closed)
    if arrays is None or any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in arrays):
        return None  # keys of random numbers have no bytes to compare
    constants = [np.asarray(x) for x in arrays]
    if any(x.nbytes > _MAX_CONSTANT_BYTES for x in constants):
        return None
    return str(closed), *(f"{x.dtype}{x.shape}{x.tobytes()!r}" for x in constants)


def _list_constants(closed: PyTree) -> list[jax.Array | np.ndarray] | None:
    """Returns the arrays that a traced function and its bodies hold, in order.

    `None` if the function calls back to Python, where no text tells functions apart.
    """
    constants = [*getattr(closed, "consts", ())]
    jaxpr: PyTree = getattr(closed, "jaxpr", closed)
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            return None
        for param in equation.params.values():
            for body in param if isinstance(param, tuple | list) else (param,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    inner = _list_constants(body)
                    if inner is None:
                        return None
                    constants += inner
    return constants
