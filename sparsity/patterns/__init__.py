"""Patterns: units of entries that are kept or removed together."""

from sparsity.patterns.base import SparsityType, Unstructured
from sparsity.patterns.blocks import Block, Channel
from sparsity.patterns.fan_in import FanIn
from sparsity.patterns.nm import NByM, parse_nm
from sparsity.patterns.parse import parse_sparsity_type, register_pattern

__all__ = [
    "Block",
    "Channel",
    "FanIn",
    "NByM",
    "SparsityType",
    "Unstructured",
    "parse_nm",
    "parse_sparsity_type",
    "register_pattern",
]
