"""Strategies: dictionaries {epoch: method and densities}.

    {10: {"method": "str_unified_local", "prune_rate_pattern": (2, 4)},
     20: {"method": "unstr_local", "prune_rate_pattern": {"Dense_0-kernel": 0.1}}}

A method is `unstr` or `str`, then

- `global`: all layers are ranked together, under one density in total.
- `unified_local`: every layer has the same density or pattern.
- `local`: a dictionary names layers and their densities or patterns; other layers stay unchanged. A
  dictionary under `unified_local` means the same.

A density in (0, 1] is the fraction to keep (`unstr`). A pattern is (n, m), 'n:m' or `NByM(n, m,
axis)` (`str`). A pattern keeps n of every m consecutive weights along an axis, by default the last
axis; a shorter last group also keeps n, or all its weights. As a pattern fixes the density of each
group, `global` and `unified_local` are the same for patterns.

Without names, all layers with more than one axis are pruned (kernels). A layer is named by its
path, joined by '-' or '/' or as a tuple. The name of a module stands for all its parameters that no
other key names.

Source: Kao 2022, "JAX-Pruning", whose README describes these strategies; no code is taken from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import chex

from sparsity.core import trees
from sparsity.core.checks import check_density, check_int
from sparsity.core.names import suggest
from sparsity.core.trees import Params, PyTree
from sparsity.masks import BatchAxes, Site, leading_axes
from sparsity.patterns import NByM, SparsityType, Unstructured, parse_nm

Strategy: TypeAlias = Mapping[int, Mapping[str, object]]

METHODS = tuple(
    f"{kind}_{scope}" for kind in ("unstr", "str") for scope in ("global", "unified_local", "local")
)


class Rule(NamedTuple):
    """Pattern and sparsity of a layer."""

    pattern: SparsityType
    sparsity: float


class StrategyEntry(NamedTuple):
    """Entry of a strategy: one rule for all layers, or rules by the keys that name layers."""

    epoch: int
    is_global: bool
    rules: Rule | dict[str | trees.Path, Rule]

    def find_rule(self, path: trees.Path, param: PyTree, batch_axes: int) -> Rule | None:
        """Returns the rule of a weight, or `None` if the weight stays unchanged."""
        if isinstance(self.rules, Rule):
            return self.rules if param.ndim - batch_axes > 1 else None
        prefixes = (path[:end] for end in range(len(path), 0, -1))
        keys = (key for prefix in prefixes for key in _list_keys(prefix))
        return next((self.rules[key] for key in keys if key in self.rules), None)

    def check_names(self, weights: Params) -> None:
        """Raises a ValueError unless each key names exactly one layer, and no two keys the same."""
        if isinstance(self.rules, Rule):
            return
        paths = trees.leaves_by_names(weights)
        prefixes = dict.fromkeys(p[:end] for p in paths for end in range(1, len(p) + 1))
        owners: dict[trees.Path, str | trees.Path] = {}
        for key in self.rules:
            matching = [prefix for prefix in prefixes if key in _list_keys(prefix)]
            place = f"{key!r} in the strategy of epoch {self.epoch}"
            if not matching:
                layers = ["/".join(path) for path in paths]
                if isinstance(key, str) and "/" not in key:
                    layers = ["-".join(path) for path in paths]
                raise ValueError(f"{place} names no layer. {suggest(key, layers, cutoff=0)}")
            if len(matching) > 1:
                raise ValueError(f"{place} may mean any of {matching}. Give the tuple of names.")
            if matching[0] in owners:
                raise ValueError(f"{place} names the same layer as {owners[matching[0]]!r}.")
            owners[matching[0]] = key


class Stage(NamedTuple):
    """Stage of a strategy for a tree of parameters: sites and sparsities of the pruned layers."""

    is_global: bool
    sites: dict[trees.KeyPath, Site]
    sparsities: dict[trees.KeyPath, chex.Numeric]


def _list_keys(path: trees.Path) -> tuple[str | trees.Path, ...]:
    """Returns the keys that name a layer."""
    return path, "/".join(path), "-".join(path)


def parse(strategy: object) -> dict[int, StrategyEntry]:
    """Returns the entries of a strategy by epoch, in order; checks all but the names of layers."""
    if not isinstance(strategy, Mapping):
        raise ValueError(
            "A strategy is a dictionary {epoch: {'method': ..., 'prune_rate_pattern': ...}}, got "
            f"{strategy!r}."
        )
    for epoch in strategy:
        check_int("an epoch of a strategy", epoch, 0)
    return {int(epoch): _parse_entry(int(epoch), strategy[epoch]) for epoch in sorted(strategy)}


def _parse_entry(epoch: int, entry: object) -> StrategyEntry:
    place = f"in the strategy of epoch {epoch}"
    if not isinstance(entry, Mapping) or {*entry} != {"method", "prune_rate_pattern"}:
        raise ValueError(
            "An entry has the keys 'method' and 'prune_rate_pattern' and no others; got "
            f"{entry!r} {place}."
        )
    method, pattern = entry["method"], entry["prune_rate_pattern"]
    if method not in METHODS:
        raise ValueError(f"method = {method!r} {place} is not known. {suggest(method, METHODS)}")
    kind, _, scope = method.partition("_")

    def parse_rule(name: str, value: Any) -> Rule:
        name = f"{name} ({method!r} {place})"
        if kind == "unstr":
            check_density(name, value)
            return Rule(Unstructured(), 1.0 - float(value))
        nm = parse_nm(name, value)
        return Rule(nm, 1.0 - nm.n / nm.m)

    if not isinstance(pattern, Mapping):
        if scope == "local":
            raise ValueError(
                f"'{kind}_local' {place} needs a dictionary {{layer: value}}, got {pattern!r}. Use "
                f"'{kind}_unified_local' for all layers."
            )
        is_ranked = (kind, scope) == ("unstr", "global")
        return StrategyEntry(epoch, is_ranked, parse_rule("prune_rate_pattern", pattern))
    if scope == "global":
        raise ValueError(
            f"'{kind}_global' {place} needs one value for all layers, got {pattern!r}. Use "
            f"'{kind}_local' for a value for each."
        )
    rules = {}
    for key, value in pattern.items():
        if not isinstance(key, str | tuple):
            raise ValueError(f"A layer is named by a string or a tuple, got {key!r} {place}.")
        name = tuple(map(str, key)) if isinstance(key, tuple) else key
        rules[name] = parse_rule(f"prune_rate_pattern[{key!r}]", value)
    return StrategyEntry(epoch, False, rules)


def resolve(
    entries: Mapping[int, StrategyEntry], params: Params, batch_axes: BatchAxes = 0
) -> dict[int, Stage]:
    """Returns the stages of a strategy for the parameters, by epoch; checks all names of layers.

    Args:
      entries: result of `parse`.
      params: tree of parameters.
      batch_axes: number of leading axes that index separate matrices, or a function.
    """
    stages, weights = {}, trees.prunable(params)
    for epoch, entry in entries.items():
        entry.check_names(weights)
        stages[epoch] = stage = Stage(entry.is_global, {}, {})
        for path, param in trees.leaves_by_path(weights).items():
            names = trees.path_names(path)
            axes = leading_axes(batch_axes, names, param)
            if rule := entry.find_rule(names, param, axes):
                if isinstance(rule.pattern, NByM) and not (
                    axes - param.ndim <= rule.pattern.axis < param.ndim - axes
                ):
                    raise ValueError(
                        f"{rule.pattern} in the strategy of epoch {epoch}: "
                        f"{trees.path_string(path)!r} of shape {param.shape} has no axis "
                        f"{rule.pattern.axis}."
                    )
                stage.sites[path] = Site(path, rule.pattern, axes)
                stage.sparsities[path] = rule.sparsity
    return stages
