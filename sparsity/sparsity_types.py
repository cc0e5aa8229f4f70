"""Alias of `sparsity.patterns`: programs for jaxpruner import this path."""

from sparsity.patterns import (
    Block as Block,
    Channel as Channel,
    FanIn as FanIn,
    NByM as NByM,
    SparsityType as SparsityType,
    Unstructured as Unstructured,
    parse_nm as parse_nm,
    parse_sparsity_type as parse_sparsity_type,
)

NbyM = NByM  # the spelling of one of jaxpruner's documents
