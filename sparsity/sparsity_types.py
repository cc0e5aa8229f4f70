"""Which entries of a tensor are kept or removed together; `sparsity.patterns` says how."""

from sparsity.patterns import (
    Block,
    Channel,
    NByM,
    SparsityType,
    Unstructured,
    parse_nm,
    parse_sparsity_type,
)

NbyM = NByM  # as one of jaxpruner's documents spells it

__all__ = [
    "Block",
    "Channel",
    "NByM",
    "NbyM",
    "SparsityType",
    "Unstructured",
    "parse_nm",
    "parse_sparsity_type",
]
