"""Which entries of a tensor are kept or removed together: the types by the names of documents."""

from sparsity.patterns.types import (
    Block,
    Channel,
    NByM,
    NbyM,
    SparsityType,
    Unstructured,
    check_bool,
    check_density,
    check_fraction,
    check_int,
    check_number,
    parse_nm,
    parse_sparsity_type,
)

__all__ = [
    "Block",
    "Channel",
    "NByM",
    "NbyM",
    "SparsityType",
    "Unstructured",
    "check_bool",
    "check_density",
    "check_fraction",
    "check_int",
    "check_number",
    "parse_nm",
    "parse_sparsity_type",
]
