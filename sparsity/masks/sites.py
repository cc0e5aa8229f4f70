"""Sites: the prunable parameters of a tree, each with its pattern and its batch axes.

A table makes each site once, from the parameter. Functions that a user passes as `sparsity_type` or
`batch_axes` are called here and nowhere else. Scores, masks and gradients find a site by path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import chex
import jax

from sparsity.core import names, trees
from sparsity.core.checks import check_int, check_kind
from sparsity.core.trees import Params, Path
from sparsity.masks.budgets import MaskBudget
from sparsity.patterns import SparsityType

TopkFn: TypeAlias = Callable[[jax.Array, chex.Numeric], chex.Array]
PatternChoice: TypeAlias = SparsityType | Callable[[Path, jax.Array], SparsityType | None]
BatchAxes: TypeAlias = int | Callable[[Path, jax.Array], int]
Overrides: TypeAlias = names.Named[float | None]
_PATTERNS = (
    "Unstructured, NByM, Block, Channel, FanIn or another SparsityType, or None for a parameter "
    "that stays dense"
)


class Site(NamedTuple):
    """Prunable parameter.

    Attributes:
      key_path: path of the parameter in the tree.
      pattern: pattern of the weights that are kept or removed together.
      batch_axes: number of leading axes that index separate matrices.
      has_override: whether an override sets the sparsity of the parameter, which then competes with
        no other parameter.
      cost: cost of one weight under the budget.
      budget: budget of the masks of all sites together, `None` if there is no budget.
    """

    key_path: trees.KeyPath
    pattern: SparsityType
    batch_axes: int
    has_override: bool = False
    cost: float = 1.0
    budget: MaskBudget | None = None

    @property
    def name(self) -> str:
        return trees.path_string(self.key_path)


class Sites(Mapping[trees.KeyPath, Site]):
    """Table of the sites of a tree, which makes and checks a site when it is first read.

    Args:
      params: tree of parameters.
      pattern: a pattern, or a function of (path, param) that returns one, `None` for a parameter
        that stays dense.
      batch_axes: number of leading axes that index separate matrices, or a function.
      overrides: keys of the parameters whose sparsity an override sets.
      checked: raise a ValueError for a parameter whose shape does not fit the pattern.
      budget: defines the costs of weights; `None` if all cost the same.
      has_user_filter: whether a filter or a function of the user says which parameters have no
        sparsity, and not the default filter of a distribution.
    """

    def __init__(
        self,
        params: Params,
        pattern: PatternChoice,
        batch_axes: BatchAxes = 0,
        overrides: Overrides | None = None,
        checked: bool = True,
        budget: MaskBudget | None = None,
        has_user_filter: bool = False,
    ) -> None:
        self.params, leaves = params, trees.leaves_by_path(params)
        self._params = {x: leaf for x, leaf in leaves.items() if trees.is_prunable(leaf)}
        self._pattern, self._batch_axes = pattern, batch_axes
        self._overrides, self._checked = overrides or {}, checked
        self._budget, self.has_user_filter = budget, has_user_filter
        self.excluded: Collection[trees.KeyPath] = ()  # which stay dense under any override
        self._sites: dict[trees.KeyPath, Site] = {}
        self._patterns: dict[trees.KeyPath, SparsityType | None] = {}

    def __iter__(self) -> Iterator[trees.KeyPath]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)

    def __getitem__(self, key_path: trees.KeyPath) -> Site:
        if key_path not in self._sites:
            param, name = self._params[key_path], trees.path_string(key_path)
            axes = leading_axes(self._batch_axes, trees.path_names(key_path), param)
            pattern = self._find_pattern(key_path)
            if pattern is None:
                raise ValueError(
                    f"sparsity_type keeps {name!r} of shape {param.shape} dense, so that it can "
                    "have no sparsity and no mask of its own. Give None for it, or a pattern."
                )
            if self._checked:
                pattern.check(param.shape, axes, name)
            budget = self._budget
            cost = 1.0 if budget is None else budget.cost(trees.path_names(key_path), param)
            is_fixed = self._has_override(key_path)
            self._sites[key_path] = Site(key_path, pattern, axes, is_fixed, cost, budget)
        return self._sites[key_path]

    def without(self, key_paths: Collection[trees.KeyPath]) -> Sites:
        """Returns the table with some parameters excluded, which stay dense under any override."""
        sites = copy.copy(self)
        sites.excluded = frozenset(key_paths)
        return sites

    def stays_dense(self, key_path: trees.KeyPath) -> bool:
        """Returns whether a parameter is excluded, or has no pattern and no override."""
        has_pattern = self._find_pattern(key_path) is not None or self._has_override(key_path)
        return key_path in self.excluded or not has_pattern

    def is_named(self, key_path: trees.KeyPath) -> bool:
        """Returns whether an override names a parameter, or `sparsity_type` keeps it dense."""
        if key_path not in self._params:
            return False
        return self._find_pattern(key_path) is None or self._has_override(key_path)

    def _has_override(self, key_path: trees.KeyPath) -> bool:
        return names.best_key(self._overrides, trees.path_string(key_path)) is not None

    def _find_pattern(self, key_path: trees.KeyPath) -> SparsityType | None:
        """Returns the pattern of a parameter; calls a function of (path, param) once."""
        if key_path not in self._patterns:
            source = self._pattern
            pattern = source if isinstance(source, SparsityType) else None
            if not isinstance(source, SparsityType):
                pattern = source(trees.path_names(key_path), self._params[key_path])
            label = f"sparsity_type of {trees.path_string(key_path)!r}"
            check_kind(label, pattern, SparsityType | None, _PATTERNS)
            self._patterns[key_path] = pattern
        return self._patterns[key_path]


def leading_axes(batch_axes: BatchAxes, path: Path, param: jax.Array) -> int:
    """Returns the number of leading axes of a parameter that index separate matrices."""
    axes = batch_axes(path, param) if callable(batch_axes) else batch_axes
    name = trees.join_names(path)
    most = param.ndim if callable(batch_axes) else None
    check_int(f"batch_axes of {name!r}", axes, 0, most)
    return min(axes, param.ndim)  # one number for all: a bias has fewer axes
