"""The options of the trainer, given as `--config.NAME=VALUE`."""

from __future__ import annotations

import difflib
import re
import sys

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

import sparsity

# name: (default, or the type of an option that is not set by default; meaning)
OPTIONS = {
    "seed": (0, "initial weights and order of the images"),
    "epochs": (30, "passes over the 4,000 training images"),
    "batch_size": (100, "images in a step"),
    "learning_rate": (2e-3, "Adam's; falls to zero along a cosine"),
    "timed_steps": (100, "steps of each network that are timed after training"),
    "sparsity.algorithm": ("magnitude", ", ".join(sparsity.all_algorithm_names())),
    "sparsity.sparsity": (
        float,
        "fraction of the weights to remove, in [0, 1]; by default 0.9, or what an N:M type removes",
    ),
    "sparsity.dist_type": ("uniform", "sparsity of the layers: uniform or erk"),
    "sparsity.sparsity_type": (
        "unstructured",
        "unstructured, nm_2,4, nm_2,4,-2, block_4,4 or channel_-1; the first and the last layer"
        " stay dense unless it is unstructured",
    ),
    "sparsity.update_freq": (20, "steps from one mask update to the next"),
    "sparsity.update_start_step": (int, "first mask update; by default after 20 % of all steps"),
    "sparsity.update_end_step": (int, "last mask update; by default after 60 % of all steps"),
    "sparsity.drop_fraction": (float, "share of the weights that set and rigl replace at first"),
    "sparsity.use_packed_masks": (False, "store one bit a weight instead of a byte"),
    "sparsity.skip_gradients": (bool, "leave the weights as they are in mask updates"),
    "sparsity.is_sparse_gradients": (bool, "keep the gradients of pruned weights from Adam"),
    "sparsity.store_masks": (bool, "magnitude_ste, random_ste: new masks at updates only"),
    "sparsity.use_normalization": (bool, "global pruners: divide scores by each layer's norm"),
    "sparsity.rng_seed": (int, "seed of the algorithms that draw masks"),
}


def get_config() -> ConfigDict:
    """Returns the default configuration."""
    config = ConfigDict({"sparsity": {}})
    for name, (default, _) in OPTIONS.items():
        *section, key = name.split(".")
        value = config_dict.placeholder(default) if isinstance(default, type) else default
        (config[section[0]] if section else config)[key] = value
    return config


def from_command_line() -> ConfigDict:
    """Returns the configuration that `sys.argv` asks for; `--help` prints the options and exits.

    Raises:
      ValueError: an option is not known; the nearest and all others are named.
      absl.flags.Error: a value does not fit its option.
    """
    if {"--help", "-h"} & set(sys.argv):
        print(_help())
        sys.exit()
    for argument in sys.argv[1:]:
        option = re.match(r"--?(?:no)?config(?:\.([^=]*))?", argument)
        if option and option[1] not in OPTIONS:
            near = difflib.get_close_matches(option[1] or "", OPTIONS, n=1)
            hint = f"Did you mean --config.{near[0]}? " if near else ""
            raise ValueError(f"There is no option {option[0]}. {hint}--help lists all options.")
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_dict("config", get_config(), flag_values=values)
    rest = values(sys.argv)[1:]
    if rest:
        raise ValueError(f"{rest[0]!r} is no option; write --config.NAME=VALUE.")
    return config.value


def check(config: ConfigDict) -> None:
    """Raises a ValueError that names an option whose value makes no sense."""
    for name in ("epochs", "batch_size", "learning_rate", "timed_steps"):
        if not config[name] > 0:
            raise ValueError(f"--config.{name} must be positive, got {config[name]}.")
    if config.seed < 0:
        raise ValueError(f"--config.seed must not be negative, got {config.seed}.")


def _help() -> str:
    lines = ["Options, written as --config.NAME=VALUE:", ""]
    for name, (default, meaning) in OPTIONS.items():
        shown = default.__name__ if isinstance(default, type) else default
        lines.append(f"  {name} ({shown}):\n      {meaning}")
    return "\n".join(lines)
