"""Names of earlier libraries, for programs that were written for them."""

from sparsity.compat import jax_pruning, jaxpruner

__all__ = ["jax_pruning", "jaxpruner"]
