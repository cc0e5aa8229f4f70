"""SR-STE: a straight-through estimator with a decay of masked weights.

Source: Zhou et al. 2021, "Learning N:M fine-grained structured sparse neural networks from
scratch", equation 9.
"""

from __future__ import annotations

import dataclasses

from sparsity.algorithms.pruners import MagnitudePruning
from sparsity.algorithms.ste import StraightThrough
from sparsity.core import trees
from sparsity.core.checks import check_number
from sparsity.core.trees import Grads, Params, PyTree
from sparsity.masks import apply_mask
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class SRSTE(StraightThrough, MagnitudePruning):
    """Uses the largest weights in the forward pass, trains all, and decays masked weights.

    The gradient g of the masked network is passed straight through, plus `decay` times each masked
    weight: g + decay * (1 - mask) * w. The decay makes masks flip less often. The method is made
    for `sparsity_type=NByM(2, 4)`.

    Attributes:
      decay: decay of masked weights, at least 0; 2e-4 in the source.

    Source: Zhou et al. 2021, "Learning N:M fine-grained structured sparse neural networks from
    scratch", equation 9.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
      >>> pruner = SRSTE(decay=0.5, sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> state = pruner.wrap_optax(optax.sgd(0.1)).init(weights)
      >>> pruner.modify_gradients(jnp.zeros((2, 2)), weights, state)
      Array([[0.5 , 0.  ],
             [0.  , 0.25]], dtype=float32)
    """

    decay: float = 2e-4

    def check_fields(self) -> None:
        super().check_fields()
        check_number("decay", self.decay, 0)

    def modify_gradients(self, grads: Grads, params: Params, sparse_state: SparseState) -> Grads:
        masks = self.make_forward_masks(params, sparse_state, is_packed=False)

        def add(_: trees.KeyPath, grad: PyTree, param: PyTree, mask: PyTree) -> PyTree:
            if mask is None:
                return grad
            pruned = param - apply_mask(param, mask)
            return grad + (self.decay * pruned).astype(grad.dtype)

        return trees.map_matched(add, grads, params, masks)
