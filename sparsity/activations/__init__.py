"""Sparse activations: keep the largest magnitudes of a tensor inside a model.

`prune_act_unstruct` and `prune_act_struct` are functions of one array. `sparsify_linen` and
`sparsify_nnx` apply them to the outputs of chosen layers of a flax model that is not edited; each
layer reports the sparsity of its output as the intermediate `activation_sparsity`.
"""

from sparsity.activations.flax_layers import (
    sparsify_linen as sparsify_linen,
    sparsify_nnx as sparsify_nnx,
)
from sparsity.activations.functions import (
    prune_act_struct as prune_act_struct,
    prune_act_unstruct as prune_act_unstruct,
)
