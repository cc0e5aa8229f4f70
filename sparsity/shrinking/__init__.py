"""Models that become smaller: channels that masks leave dead are removed for real."""

from sparsity.shrinking.plan import Plan
from sparsity.shrinking.shrink import Small, shrink

__all__ = ["Plan", "Small", "shrink"]
