"""Models whose masked parameters are stored, multiplied and trained as their kept values."""

from sparsity.compacting.compact import Compact, compact

__all__ = ["Compact", "compact"]
