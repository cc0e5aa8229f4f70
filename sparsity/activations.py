"""Sparse activations: keep the largest magnitudes of a tensor inside a model.

`prune_act_unstruct` and `prune_act_struct` are functions of one array. `sparsify_linen` and
`sparsify_nnx` apply them to the outputs of chosen layers of a flax model that is not edited; each
layer reports the sparsity of its output as the intermediate `activation_sparsity`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp

from sparsity import selection
from sparsity.core import extras, names, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import (
    check_bool,
    check_density,
    check_function,
    check_int,
    check_kind,
    warn,
)
from sparsity.core.sharding import shard_like
from sparsity.masks import apply_mask, apply_mask_straight_through
from sparsity.patterns import NByM, Unstructured, parse_nm

OutputPattern: TypeAlias = float | str | tuple[int, int] | NByM
LayerPatterns: TypeAlias = names.Named[OutputPattern]
PruneFn: TypeAlias = Callable[[chex.Array], jax.Array]
P = ParamSpec("P")
R = TypeVar("R")
Module = TypeVar("Module")
_REPORT = "activation_sparsity"


def prune_act_unstruct(
    x: chex.Array, density: chex.Numeric, *, batch_axes: int = 0, straight_through: bool = False
) -> jax.Array:
    """Keeps the entries of the largest magnitude, with their sign; all others become 0.0.

    Of n entries exactly `max(1, round_half_even(n * (1 - float32(1 - density))))` are kept; ties go
    to the lowest index. A density is the fraction to keep, a sparsity the fraction to remove.

    Args:
      x: [*batch, ...] array of any floating or complex dtype.
      density: fraction to keep, in (0, 1]; may be traced.
      batch_axes: number of leading axes that index separate slices, each of which keeps `density`;
        by default the array is one slice.
      straight_through: pass the gradient to all entries, not only to kept ones.

    Returns:
      Array of the shape, dtype and sharding of `x`.

    Raises:
      ValueError: an argument is out of range, or `x` is an array of integers.

    Example:
      >>> prune_act_unstruct(jnp.array([1.0, -4.0, 0.5, 3.0]), 0.5)
      Array([ 0., -4.,  0.,  3.], dtype=float32)
    """
    check_density("density", density)
    check_int("batch_axes", batch_axes, 0)
    if not isinstance(density, int | float):  # bfloat16 would round the difference
        density = jnp.asarray(density, promote(jnp.result_type(density), jnp.float32))
    create = functools.partial(Unstructured().select, sparsity=1 - density, batch_axes=batch_axes)
    return _apply_created_mask(x, create, straight_through)


def prune_act_struct(
    x: chex.Array,
    pattern: str | tuple[int, int] | NByM,
    axis: int = -1,
    *,
    straight_through: bool = False,
) -> jax.Array:
    """Keeps the n largest magnitudes of every m consecutive entries, with their sign.

    A shorter last group keeps n entries, or all if it has fewer. Ties go to the lowest index.

    Args:
      x: array of any floating or complex dtype with at least one axis.
      pattern: (n, m), 'n:m', or an `NByM`; n in [1, m].
      axis: the axis of the groups, unless `pattern` is an `NByM`.
      straight_through: pass the gradient to all entries, not only to kept ones.

    Returns:
      Array of the shape, dtype and sharding of `x`.

    Raises:
      ValueError: an argument is out of range, or `x` is an array of integers.

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks".

    Example:
      >>> prune_act_struct(jnp.array([1.0, -4.0, 0.5, 3.0, 2.0]), (1, 4))
      Array([ 0., -4.,  0.,  0.,  2.], dtype=float32)
    """
    nm = parse_nm("pattern", pattern, axis)

    def create(scores: jax.Array) -> jax.Array:
        select = functools.partial(selection.nm_mask, n=nm.n, m=nm.m, axis=nm.axis)
        return shard_like(scores, select, scores)

    return _apply_created_mask(x, create, straight_through)


def _apply_created_mask(
    x: chex.Array, create: Callable[[jax.Array], jax.Array], straight_through: bool
) -> jax.Array:
    check_bool("straight_through", straight_through)
    x = jnp.asarray(x)
    if not trees.is_prunable(x):
        raise ValueError(f"x must be an array of floating or complex numbers, got {x.dtype}.")
    mask = create(jnp.abs(jax.lax.stop_gradient(x)))
    return (apply_mask_straight_through if straight_through else apply_mask)(x, mask)


def sparsify_linen(
    apply: Callable[P, R],
    layers: LayerPatterns,
    *,
    batch_axes: int = 0,
    straight_through: bool = False,
) -> Callable[P, R]:
    """Returns the `apply` of a flax linen model with sparse outputs of chosen layers.

    A method interceptor prunes the outputs while the model runs; the model is not edited. Apply
    with `mutable=["intermediates"]` to read the sparsity of each output. A layer in `nn.scan` or
    `nn.vmap` reports its sparsity if `variable_axes` has an axis for intermediates, and else warns.

    Args:
      apply: `model.apply` (or `model.init`), not jitted: a compiled function calls no layers.
      layers: a density in (0, 1] or a pattern (n, m) for each key. A key is the path of a layer,
        joined by '/' or as a tuple, a regular expression that matches the complete path, or a
        compiled pattern that is searched in the path. A complete path takes precedence over
        patterns; of patterns the first match counts.
      batch_axes: as in `prune_act_unstruct`.
      straight_through: as in `prune_act_unstruct`.

    Returns:
      A function with the arguments and results of `apply`. The function raises a ValueError if a
      key matches none of the layers that ran, or if a layer does not return one array.

    Raises:
      ValueError: a density or a pattern is out of range.

    Example:
      >>> import flax.linen as nn
      >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
      >>> apply = sparsify_linen(model.apply, {"layers_0": 0.25})
      >>> variables = model.init(jax.random.key(0), jnp.ones((1, 4)))
      >>> _, state = apply(variables, jnp.ones((1, 4)), mutable=["intermediates"])
      >>> state["intermediates"]["layers_0"]["activation_sparsity"]
      (Array(0.75, dtype=float32),)
    """
    linen = extras.load("flax.linen", "flax")
    in_filter = extras.load("flax.core.scope", "flax").in_filter
    prune_fns = _make_prune_fns(layers, batch_axes, straight_through)
    check_function("apply", apply, "the variables and the inputs, such as model.apply")
    if hasattr(getattr(apply, "func", apply), "lower"):
        raise ValueError(
            "apply is compiled by jax.jit, and its layers run only while it is traced. Pass "
            "model.apply itself, and jit the result."
        )

    @functools.wraps(apply)
    def sparse_apply(*args: P.args, **kwargs: P.kwargs) -> R:
        reported: dict[str, bool] = {}
        with linen.intercept_methods(functools.partial(_intercept, prune_fns, reported, [])):
            result = apply(*args, **kwargs)
        _check_keys(prune_fns, reported)
        if in_filter(kwargs.get("mutable", False), "intermediates"):
            _warn_of_unreported(reported)
        return result

    return sparse_apply


def sparsify_nnx(
    model: Module, layers: LayerPatterns, *, batch_axes: int = 0, straight_through: bool = False
) -> Module:
    """Returns a copy of a flax nnx model with sparse outputs of chosen layers.

    The copy has the same parameters at the same paths; the model stays unchanged. Because nnx has
    no interceptors, a chosen layer of the copy is an instance of a subclass that prunes the output
    of its class. `nnx.capture(copy, nnx.Intermediate)` returns the sparsity of each output.

    Args:
      model: an `nnx.Module`.
      layers: as in `sparsify_linen`.
      batch_axes: as in `prune_act_unstruct`.
      straight_through: as in `prune_act_unstruct`.

    Returns:
      An `nnx.Module` of the class of `model`.

    Raises:
      ValueError: a density or a pattern is out of range, or a key names no layer.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> sparse = sparsify_nnx(model, {"layers/0": (2, 4)})
      >>> int((sparse(jnp.ones((1, 4))) != 0).sum()) <= 4
      True
    """
    nnx = extras.load("flax.nnx", "flax")
    prune_fns = _make_prune_fns(layers, batch_axes, straight_through)
    check_kind("model", model, nnx.Module, "an nnx.Module")
    copy: Module = nnx.merge(*nnx.split(model))
    nodes = nnx.iter_graph(copy)
    modules = {
        "/".join(map(str, path)): node
        for path, node in nodes
        if path and isinstance(node, nnx.Module)
    }
    _check_keys(prune_fns, modules)

    def make_sparse_class(base: Any, prune: PruneFn, name: str) -> Any:
        class Sparse(base):  # type: ignore[misc]  # a class that exists only at run time
            def __call__(self, *args: trees.PyTree, **kwargs: trees.PyTree) -> jax.Array:
                output, sparsity = _prune_output(prune, super().__call__(*args, **kwargs), name)
                if hasattr(self, "__captures__"):  # nnx.capture runs the model
                    self.sow(nnx.Intermediate, _REPORT, sparsity)
                return output

        return Sparse

    for name, module in modules.items():
        if (key := names.best_key(prune_fns, name)) is not None:
            module.__class__ = make_sparse_class(type(module), prune_fns[key], name)
    return copy


def _make_prune_fns(
    layers: LayerPatterns, batch_axes: int, straight_through: bool
) -> dict[names.Key, PruneFn]:
    """Returns the functions that prune the outputs of layers, by key."""

    check_kind("layers", layers, Mapping, "a dict {name of a layer: pattern or density}")
    check_int("batch_axes", batch_axes, 0)
    check_bool("straight_through", straight_through)

    def make_prune_fn(key: names.Key, pattern: OutputPattern) -> PruneFn:
        if isinstance(pattern, str | tuple | list | NByM):
            nm = parse_nm(f"layers[{key!r}]", pattern)
            return functools.partial(
                prune_act_struct, pattern=nm, straight_through=straight_through
            )
        check_density(f"layers[{key!r}]", pattern)
        return functools.partial(
            prune_act_unstruct,
            density=pattern,
            batch_axes=batch_axes,
            straight_through=straight_through,
        )

    return {key: make_prune_fn(key, pattern) for key, pattern in layers.items()}


def _intercept(
    prune_fns: dict[names.Key, PruneFn],
    reported: dict[str, bool],
    running: list[str],
    call: Callable[..., trees.PyTree],
    args: tuple[trees.PyTree, ...],
    kwargs: dict[str, trees.PyTree],
    context: Any,
) -> trees.PyTree:
    """Calls a method of a linen module; prunes and reports the output of a chosen layer.

    `reported` gets each layer that runs, and whether the caller can read a chosen layer's report.
    """
    name = "/".join(context.module.path)
    if context.method_name != "__call__" or not name or name in running:
        return call(*args, **kwargs)  # a layer that runs calls `__call__` of its base class
    running.append(name)
    output = call(*args, **kwargs)
    running.pop()
    reported[name] = True
    if (key := names.best_key(prune_fns, name)) is None:
        return output
    output, sparsity = _prune_output(prune_fns[key], output, name)
    reported[name] = context.module.sow("intermediates", _REPORT, sparsity)
    return output


def _warn_of_unreported(reported: Mapping[str, bool]) -> None:
    """Warns of chosen layers whose sparsity a lifted transformation keeps to itself."""
    if unreported := [name for name, is_reported in reported.items() if not is_reported]:
        warn(
            f"The activation_sparsity of {trees.listed(unreported)} is not reported: it runs "
            "in a transformation of flax without intermediates. Give nn.scan or nn.vmap "
            "variable_axes with 'intermediates': 0."
        )


def _check_keys(keys: Iterable[names.Key], layers: Iterable[str]) -> None:
    for key in keys:
        if not any(names.matches(key, name) for name in layers):
            raise ValueError(
                f"layers[{key!r}] matches no layer. {names.explain_syntax(key)}"
                f"{names.suggest(key, layers, cutoff=0)}"
            )


def _prune_output(prune: PruneFn, output: trees.PyTree, name: str) -> tuple[jax.Array, jax.Array]:
    """Prunes the output of a layer; returns the output and the fraction of zeros."""
    if not trees.is_prunable(output):
        raise ValueError(
            f"Layer {name!r} returns {type(output).__name__}, but a layer with sparse activations "
            "must return one array of floating or complex numbers."
        )
    output = prune(output)
    return output, jnp.mean(output == 0, dtype=jnp.float32)
