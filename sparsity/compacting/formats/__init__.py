"""Formats of kept values: one class each, and their table.

- `base.py` says what a format defines, and holds `KeptArray`, the arrays of a parameter.
- `values.py`, `grouped.py` and `dense.py` hold a format each.
- `grouped_products.py` multiplies groups, and `find_groups.py` finds groups in a mask.
"""

from sparsity.compacting.formats.base import FormatLayout
from sparsity.compacting.formats.dense import Dense
from sparsity.compacting.formats.grouped import Grouped
from sparsity.compacting.formats.values import Values

_ALL: tuple[type[FormatLayout], ...] = Values, Grouped, Dense
FORMAT_LAYOUTS = {layout.format: layout for layout in _ALL}
# The first that fits, for parameters without a chosen format.
AUTOMATIC = Grouped, Values
ANY_MASK = Values.format  # the format that every parameter can have

__all__ = ["ANY_MASK", "AUTOMATIC", "FORMAT_LAYOUTS"]
