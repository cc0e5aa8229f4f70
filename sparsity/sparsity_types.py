"""Alias of `sparsity.patterns`: programs for jaxpruner import this path."""

from sparsity.patterns import (
    Block,
    Channel,
    FanIn,
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
    "FanIn",
    "NByM",
    "NbyM",
    "SparsityType",
    "Unstructured",
    "parse_nm",
    "parse_sparsity_type",
]
