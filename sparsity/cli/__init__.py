"""The command `sparsity` inspects, prunes and compares checkpoints, and unpickles nothing."""

from sparsity.cli.main import main as main
