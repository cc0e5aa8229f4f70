"""Needs of pruners and refits: attributes that their classes state, and defaults for all others.

A refit is any object with the method of `Refit` or `BiasRefit`, and a pruner any updater, so that
neither need have heard of a base class.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from sparsity.calibration.refits.base import BiasRefit
from sparsity.calibration.statistics.row_sums import (
    FIELDS_BY_KIND,
    StatisticsKind,
    check_statistics_kind,
)
from sparsity.core.trees import PyTree
from sparsity.training.base_updater import BaseUpdater


class Needs(NamedTuple):
    """Attributes that a pruner or a refit may state; `StatisticsPruning` and `Refit` tell more."""

    statistics_kind: StatisticsKind
    damping: float | None = None

    @property
    def has_grams(self) -> bool:
        """True if the statistics are Gram matrices."""
        return self.statistics_kind == "gram"


def combine_needs(pruner: object, refit: object | None) -> Needs:
    """Returns the needs of a run, which always takes means, for centred errors.

    Raises:
      ValueError: no kind of statistics gives the sums of both the pruner and the refit.
    """
    methods = [pruner] if refit is None else [pruner, refit]
    stated = [*map(read_needs, methods)]
    fields = {"sums"}.union(*(FIELDS_BY_KIND[needs.statistics_kind] for needs in stated))
    kinds = [kind for kind, fields_of_kind in FIELDS_BY_KIND.items() if fields <= fields_of_kind]
    if not kinds:
        names = " and ".join(map(method_name, methods))
        raise ValueError(f"{names}: no statistics_kind gives {sorted(fields)}, which a run needs.")
    return stated[-1]._replace(statistics_kind=kinds[0])


def method_name(method: object) -> str:
    """Returns the name of a pruner's or refit's class, or of a function, for messages.

    Example:
      >>> method_name(lambda dense, pruned, mask, statistic, select: (pruned, mask))
      'the function <lambda>'
    """
    function = method.func if isinstance(method, functools.partial) else method
    name = getattr(function, "__name__", None)
    return type(method).__name__ if name is None else f"the function {name}"


def read_needs(method: object) -> Needs:
    """Returns the needs of a pruner or a refit.

    By default a pruner needs sums of squares, for errors and not for masks; a refit needs Gram
    matrices, and means for biases.
    """
    kind = "moments" if isinstance(method, BiasRefit) else "gram"
    kind = "squares" if isinstance(method, BaseUpdater) else kind
    names = (name for name in Needs._fields if hasattr(method, name))
    stated: PyTree = {name: getattr(method, name) for name in names}
    needs = Needs(**{"statistics_kind": kind, **stated})
    check_statistics_kind(needs.statistics_kind, method_name(method))
    return needs
