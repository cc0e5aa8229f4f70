"""A scope in which channels are worth what the products that read them lose."""

from __future__ import annotations

import dataclasses

from sparsity.base_updater import BaseUpdater
from sparsity.graph import Coupled, Graph
from sparsity.graph.uses import Path


@dataclasses.dataclass(frozen=True)
class Readers(Coupled):
    """Coupled channels whose importance is that of the leaves that read them."""

    @classmethod
    def of(cls, pruner: BaseUpdater) -> Readers:
        """The pruner's coupled channels, as their readers see them.

        Raises:
          ValueError: its scope is another one.
        """
        scope = pruner.scope
        if not isinstance(scope, Coupled):
            raise ValueError(
                f"{type(pruner).__name__} removes channels and needs scope = "
                f"Coupled(sparsity.trace(fn, params, batch)), got scope = {scope!r}."
            )
        return cls(**{field.name: getattr(scope, field.name) for field in dataclasses.fields(cls)})

    def is_scored(self, graph: Graph, path: Path, axis: int) -> bool:
        return any(use.path == path and axis in use.contracting for use in graph.uses)
