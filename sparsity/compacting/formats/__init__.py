"""Formats of kept values: one class each, and their table."""

from sparsity.compacting.formats.dense import Dense
from sparsity.compacting.formats.grouped import Grouped
from sparsity.compacting.formats.slices import WholeSlices
from sparsity.compacting.formats.storage import Storage
from sparsity.compacting.formats.values import Values

_ALL: tuple[type[Storage], ...] = Values, Grouped, WholeSlices, Dense
STORAGES = {storage.format: storage for storage in _ALL}
# The first that fits, for parameters without a chosen format.
AUTOMATIC = WholeSlices, Grouped, Values
ANY_MASK = Values.format  # the format that every parameter can have

__all__ = ["ANY_MASK", "AUTOMATIC", "STORAGES"]
