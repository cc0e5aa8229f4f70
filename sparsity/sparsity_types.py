"""Patterns by the import path of jaxpruner; see `sparsity.patterns`."""

from sparsity.patterns import (
    Block,
    Channel,
    NByM,
    SparsityType,
    Unstructured,
    parse_nm,
    parse_sparsity_type,
)

NbyM = NByM  # the spelling of one of jaxpruner's documents

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
