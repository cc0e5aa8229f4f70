"""Scopes in which each slice of a parameter has a mask of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp

from sparsity.core.trees import KeyPath
from sparsity.masks import Layerwise, Scope, TopkFn, Wanted


def is_per_slice(scope: object) -> TypeGuard[Scope]:
    """Returns whether each slice of a leaf has a mask that depends on its own scores alone."""
    return getattr(scope, "per_slice", False) is True


@dataclasses.dataclass(frozen=True)
class Within(Layerwise):
    """A scope of slices whose entries compete where they agree along some axes.

    Attributes:
      scope: what selects within a slice.
      apart: these axes, by path.
    """

    scope: Scope
    apart: Mapping[KeyPath, tuple[int, ...]]

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each leaf."""
        masks = self.scope.select([self._moved(leaf) for leaf in leaves], topk_fn)
        return [
            jnp.moveaxis(mask, range(len(axes)), axes)
            for axes, mask in zip(map(self._axes, leaves), masks, strict=True)
        ]

    def _moved(self, leaf: Wanted) -> Wanted:
        """The leaf with the axes in front."""
        axes = self._axes(leaf)
        if not axes:
            return leaf
        scores = jnp.moveaxis(jnp.asarray(leaf.scores), axes, range(len(axes)))
        return leaf._replace(scores=scores, site=leaf.site._replace(batch_axes=len(axes)))

    def _axes(self, leaf: Wanted) -> tuple[int, ...]:
        """The axes that separate single entries; units of several have an order of their own."""
        return self.apart[leaf.site.path] if leaf.site.pattern.is_elementwise else ()
