"""Sparse activations: keep the largest magnitudes of a tensor inside a model.

`prune_act_unstruct` and `prune_act_struct` are functions of one array. `sparsify_linen` and
`sparsify_nnx` apply them to the outputs of chosen layers of a flax model that is not edited; each
layer reports the sparsity of its output as the intermediate `activation_sparsity`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from sparsity import masks as masks_lib
from sparsity import selection
from sparsity.core import extras, trees
from sparsity.core.sharding import shard_like
from sparsity.sparsity_types import NByM, Unstructured, check_density, parse_nm

Pattern = float | str | tuple[int, int] | NByM
Layers = Mapping[trees.Key, Pattern]
Rule = Callable[[chex.Array], jax.Array]

_REPORT = "activation_sparsity"


def prune_act_unstruct(
    x: chex.Array,
    density: chex.Numeric,
    *,
    batch_axes: int = 0,
    straight_through: bool = False,
) -> jax.Array:
    """Keeps the entries of the largest magnitude, with their sign; all others become 0.0.

    Of n entries exactly `max(1, round_half_even(n * density))` are kept, where `1 - density` is a
    float32 as all sparsities are; ties go to the lowest index.

    Args:
      x: [*batch, ...] array of any floating or complex dtype.
      density: fraction to keep, in (0, 1]; may be traced.
      batch_axes: number of leading axes whose slices each keep their own share; by default the
        share is one of the whole array.
      straight_through: let the gradient pass everywhere, not only where an entry is kept.

    Returns:
      Array of the shape, dtype and sharding of `x`.

    Raises:
      ValueError: an argument is out of range, or `x` is an array of integers.

    Example:
      >>> prune_act_unstruct(jnp.array([1.0, -4.0, 0.5, 3.0]), 0.5)
      Array([ 0., -4.,  0.,  3.], dtype=float32)
    """
    check_density("density", density)
    create = functools.partial(
        masks_lib.create_mask,
        sparsity=1 - density,
        sparsity_type=Unstructured(),
        batch_axes=batch_axes,
    )
    return _keep(x, create, straight_through)


def prune_act_struct(
    x: chex.Array,
    pattern: str | tuple[int, int] | NByM,
    axis: int = -1,
    *,
    straight_through: bool = False,
) -> jax.Array:
    """Keeps the n largest magnitudes of every m consecutive entries, with their sign.

    A shorter last group keeps n entries as well, or all that it has. Ties go to the lowest index.

    Args:
      x: array of any floating or complex dtype with at least one axis.
      pattern: (n, m), 'n:m', or an `NByM`, which has an axis of its own; n in [1, m].
      axis: the axis along which groups lie.
      straight_through: let the gradient pass everywhere, not only where an entry is kept.

    Returns:
      Array of the shape, dtype and sharding of `x`.

    Raises:
      ValueError: an argument is out of range, or `x` is an array of integers.

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks".

    Example:
      >>> prune_act_struct(jnp.array([1.0, -4.0, 0.5, 3.0, 2.0]), (1, 4))
      Array([ 0., -4.,  0.,  0.,  2.], dtype=float32)
    """
    kind = parse_nm("pattern", pattern, axis)

    def create(scores: jax.Array) -> jax.Array:
        select = functools.partial(selection.nm_mask, n=kind.n, m=kind.m, axis=kind.axis)
        return shard_like(scores, select, scores)

    return _keep(x, create, straight_through)


pruning_act_struct = prune_act_struct  # as jax_pruning's documentation spells it, too


def _keep(x: chex.Array, create: Callable[[jax.Array], jax.Array], everywhere: bool) -> jax.Array:
    x = jnp.asarray(x)
    if not trees.is_prunable(x):
        raise ValueError(f"x must be an array of floating or complex numbers, got {x.dtype}.")
    mask = create(jnp.abs(jax.lax.stop_gradient(x)))
    return (masks_lib.apply_mask_straight_through if everywhere else masks_lib.apply_mask)(x, mask)


def sparsify_linen(
    apply: Callable[..., Any],
    layers: Layers,
    *,
    batch_axes: int = 0,
    straight_through: bool = False,
) -> Callable[..., Any]:
    """Returns the `apply` of a flax linen model with sparse outputs of chosen layers.

    A method interceptor sees to it while the model runs; the model is not edited. Apply it with
    `mutable=["intermediates"]` to read how sparse each output was.

    Args:
      apply: `model.apply` (or `model.init`), not jitted, as a compiled function calls no layers.
      layers: a density in (0, 1] or a pattern (n, m) for each layer. Layers are named by their
        path, joined by '/' or as a tuple, by a regular expression that matches all of it, or by a
        compiled pattern, which is searched in it. The first key that matches a layer counts; a full
        path comes before all patterns.
      batch_axes: as in `prune_act_unstruct`.
      straight_through: as in `prune_act_unstruct`.

    Returns:
      A function with the arguments and results of `apply`. It raises a ValueError if a key names
      none of the layers that ran, or if a layer does not return one array.

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
    rules = _rules(layers, batch_axes, straight_through)

    @functools.wraps(apply)
    def sparse_apply(*args: Any, **kwargs: Any) -> Any:
        names: dict[str, None] = {}  # those of all layers that run, in order

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = call(*args, **kwargs)
            name = "/".join(context.module.path)
            if context.method_name != "__call__" or not name:
                return out
            names[name] = None
            if (key := trees.best_key(rules, name)) is None:
                return out
            out, sparsity = _prune_output(rules[key], out, name)
            context.module.sow("intermediates", _REPORT, sparsity)
            return out

        with linen.intercept_methods(intercept):
            result = apply(*args, **kwargs)
        _check_keys(rules, names)
        return result

    return sparse_apply


def sparsify_nnx(
    model: Any, layers: Layers, *, batch_axes: int = 0, straight_through: bool = False
) -> Any:
    """Returns a copy of a flax nnx model with sparse outputs of chosen layers.

    The copy has the same parameters at the same paths; the model itself is not changed. As nnx has
    no interceptors, a chosen layer of the copy is an instance of a subclass whose call intercepts
    that of its class. `nnx.capture(copy, nnx.Intermediate)` returns how sparse each output was.

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
    rules = _rules(layers, batch_axes, straight_through)
    copy = nnx.merge(*nnx.split(model))
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(copy) if path}
    _check_keys(rules, modules)

    def sparse_class(base: Any, rule: Rule, name: str) -> Any:
        class Sparse(base):
            def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
                out, sparsity = _prune_output(rule, super().__call__(*args, **kwargs), name)
                if hasattr(self, "__captures__"):  # nnx.capture runs the model
                    self.sow(nnx.Intermediate, _REPORT, sparsity)
                return out

        return Sparse

    for name, module in modules.items():
        if (key := trees.best_key(rules, name)) is not None:
            module.__class__ = sparse_class(type(module), rules[key], name)
    return copy


def _rules(layers: Layers, batch_axes: int, straight_through: bool) -> dict[trees.Key, Rule]:
    """What to do with the output of a layer, by the key that names it."""

    def rule(key: trees.Key, pattern: Pattern) -> Rule:
        if isinstance(pattern, str | tuple | list | NByM):
            kind = parse_nm(f"layers[{key!r}]", pattern)
            return functools.partial(
                prune_act_struct, pattern=kind, straight_through=straight_through
            )
        check_density(f"layers[{key!r}]", pattern)
        return functools.partial(
            prune_act_unstruct,
            density=pattern,
            batch_axes=batch_axes,
            straight_through=straight_through,
        )

    return {key: rule(key, pattern) for key, pattern in layers.items()}


def _check_keys(keys: Iterable[trees.Key], names: Iterable[str]) -> None:
    for key in keys:
        if not any(trees.matches(key, name) for name in names):
            raise ValueError(f"layers[{key!r}] matches none. {trees.nearest(key, names, 'layers')}")


def _prune_output(rule: Rule, out: Any, name: str) -> tuple[jax.Array, jax.Array]:
    """The output of a layer, pruned, and its fraction of zeros."""
    if not trees.is_prunable(out):
        raise ValueError(
            f"Layer {name!r} returns {type(out).__name__}, but a layer with sparse activations "
            "must return one array of floating or complex numbers."
        )
    out = rule(out)
    return out, jnp.mean(out == 0, dtype=jnp.float32)
