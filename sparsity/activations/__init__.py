"""Sparse activations: keep the largest magnitudes of a tensor inside a model."""

from sparsity.activations.functions import (
    prune_act_struct,
    prune_act_unstruct,
    pruning_act_struct,
    sparsify_linen,
    sparsify_nnx,
)

__all__ = [
    "prune_act_struct",
    "prune_act_unstruct",
    "pruning_act_struct",
    "sparsify_linen",
    "sparsify_nnx",
]
