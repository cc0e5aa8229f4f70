"""Names that programs written for jax_pruning use.

Densities are fractions that stay, as its README says.
"""

from sparsity.activations import prune_act_struct, prune_act_unstruct
from sparsity.epochs import pruning, pruning_apply

__all__ = ["pruning", "pruning_act_struct", "pruning_act_unstruct", "pruning_apply"]

pruning_act_struct = prune_act_struct
pruning_act_unstruct = prune_act_unstruct
