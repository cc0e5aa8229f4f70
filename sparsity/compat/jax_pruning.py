"""Names for programs that were written for jax_pruning.

A density is the fraction that stays, as in the README of jax_pruning.
"""

from sparsity.activations import prune_act_struct, prune_act_unstruct
from sparsity.epochs import pruning, pruning_apply

__all__ = ["pruning", "pruning_act_struct", "pruning_act_unstruct", "pruning_apply"]

pruning_act_struct = prune_act_struct
pruning_act_unstruct = prune_act_unstruct
