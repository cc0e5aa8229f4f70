"""Sparse activations, and weights pruned to 2 of 4 and later to 1 of 4, as jax_pruning shows it.

bash run.sh train --config=examples/mnist/epoch_strategy.py
"""

from ml_collections import ConfigDict

from examples.mnist import config as config_lib


def get_config() -> ConfigDict:
    """Returns the configuration: 2:4 at a middle epoch, 1:4 later, both with fine-tuning."""
    config = config_lib.get_config()
    config.epochs = 30
    config.activations = (("conv1", 0.9), ("conv2", (2, 4)))
    config.sparsity.algorithm = "epoch_strategy"
    config.sparsity.strategy = (
        (10, "str_unified_local", (2, 4)),
        (20, "str_unified_local", (1, 4)),
    )
    return config
