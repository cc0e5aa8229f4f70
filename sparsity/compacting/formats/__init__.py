"""Formats of kept values: one class each, and their table."""

from sparsity.compacting.formats.dense import Dense
from sparsity.compacting.formats.grouped import Grouped
from sparsity.compacting.formats.slices import Sliced
from sparsity.compacting.formats.storage import Storage
from sparsity.compacting.formats.values import Values

FORMATS: dict[str, type[Storage]] = {each.format: each for each in (Values, Grouped, Sliced, Dense)}
AUTOMATIC = Sliced, Grouped, Values  # the first that fits, for parameters without a chosen format
ANY_MASK = Values.format  # the format that every parameter can have

__all__ = ["ANY_MASK", "AUTOMATIC", "FORMATS"]
