"""The groups of channels of a pruner as a table."""

from __future__ import annotations

from sparsity.core import extras, trees
from sparsity.core.trees import Params, Sparsities
from sparsity.graph import Coupled
from sparsity.graph.coupled import PlacedGroup


def show_groups(scope: Coupled, params: Params, targets: Sparsities) -> str:
    """Returns a table of groups: channels, those that stay at the target, and what decides.

    Args:
      scope: the scope, with the sites of its updater.
      params: tree of parameters.
      targets: tree of target sparsities.
    """
    table = extras.make_table(("group of channels", "decided by"), ("channels", "stay"))
    groups = scope.list_groups(params, targets)
    cut = [group for group in groups if not group.excluded]
    counts = dict(zip(map(id, cut), scope.count_by_sparsity(cut), strict=True))
    for group in groups:
        count = counts.get(id(group), group.full.size)
        is_open = scope.across and not group.excluded  # scores decide
        table.add_row(
            group.full.name,
            _explain(group),
            f"{group.full.size:,}",
            "" if is_open else f"{int(count):,}",
        )
    return extras.as_text(table)


def _explain(group: PlacedGroup) -> str:
    """Returns what decides how many channels of a group stay."""
    if group.excluded:
        names = trees.listed([trees.path_string(key_path) for key_path in group.excluded])
        return f"{names} left out: stays whole"
    for width in group.widths:
        sizes = [variable.size for variable in width.variables]
        if len(sizes) > 1:
            return f"a factor of {' x '.join(map(str, sizes))}"
    return ""
