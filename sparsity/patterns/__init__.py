"""Patterns: units of entries that are kept or removed together."""

from sparsity.patterns.base import SparsityType as SparsityType, Unstructured as Unstructured
from sparsity.patterns.blocks import Block as Block, Channel as Channel, FanIn as FanIn
from sparsity.patterns.nm import NByM as NByM, parse_nm as parse_nm
from sparsity.patterns.parse import (
    parse_sparsity_type as parse_sparsity_type,
    register_pattern as register_pattern,
)
