"""Sparse activations of chosen layers of a flax model that is not edited."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp

from sparsity.activations.functions import prune_act_struct, prune_act_unstruct
from sparsity.core import extras, names, trees
from sparsity.core.checks import check_bool, check_density, check_function, check_int, check_kind
from sparsity.core.warn import warn
from sparsity.patterns import NByM, parse_nm

OutputPattern: TypeAlias = float | str | tuple[int, int] | NByM
LayerPatterns: TypeAlias = names.Named[OutputPattern]
PruneFn: TypeAlias = Callable[[chex.Array], jax.Array]
P = ParamSpec("P")
R = TypeVar("R")
Module = TypeVar("Module")

_REPORT = "activation_sparsity"


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
    _check_apply(apply, linen.Module)

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


def _check_apply(apply: object, module: type) -> None:
    """Raises a ValueError unless a function runs the layers of a linen model at each call."""
    if isinstance(apply, module):
        raise ValueError(f"apply is the model: give model.apply, got apply = {apply!r}.")
    if callable(apply) and hasattr(getattr(apply, "func", apply), "lower"):
        raise ValueError(
            "apply is compiled by jax.jit: its layers run once, while it is traced, and the sparse "
            "program would stay in its cache. Pass model.apply itself, and jit the result."
        )
    check_function("apply", apply, "the variables and the inputs, such as model.apply")


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
