"""Needs of pruners and refits: attributes that their classes state, and defaults for all others.

A refit is any callable, and a pruner any updater, so that neither need have heard of a base class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sparsity.calibration.pruners.base import StatisticsPruning
from sparsity.calibration.statistics.row_sums import Kind, check_statistics_kind
from sparsity.core.trees import PyTree


def _count_nothing(outputs: int, inputs: int) -> int:
    return 0


class Needs(NamedTuple):
    """Attributes that a pruner or a refit may state; `StatisticsPruning` and `Refit` tell more."""

    statistics_kind: Kind
    gram_copies: int = StatisticsPruning.gram_copies
    count_bytes: Callable[[int, int], int] = _count_nothing
    damping: float | None = None
    shifts_biases: bool = False

    @property
    def has_grams(self) -> bool:
        """True if the statistics are Gram matrices."""
        return self.statistics_kind == "gram"


def read_pruner_needs(pruner: object) -> Needs:
    """Returns the needs of a pruner, by default sums of squares: for errors, not for masks."""
    return _read(pruner, "squares")


def read_refit_needs(refit: object) -> Needs:
    """Returns the needs of a refit, by default Gram matrices."""
    return _read(refit, "gram")


def combine_needs(pruner: object, refit: object | None) -> Needs:
    """Returns the needs of a run; without Gram matrices it takes means, for centred errors."""
    both = [read_pruner_needs(pruner), *([] if refit is None else [read_refit_needs(refit)])]
    return both[-1]._replace(
        statistics_kind="gram" if any(needs.has_grams for needs in both) else "moments",
        gram_copies=max(needs.gram_copies for needs in both),
    )


def _read(method: object, kind: Kind) -> Needs:
    names = (name for name in Needs._fields if hasattr(method, name))
    stated: PyTree = {name: getattr(method, name) for name in names}
    needs = Needs(**{"statistics_kind": kind, **stated})
    check_statistics_kind(needs.statistics_kind, type(method).__name__)
    return needs
