"""The command `sparsity`: inspects, prunes and compares checkpoints without unpickling anything."""

from sparsity.cli.main import main

__all__ = ["main"]
