"""Trains a small network on real handwritten digits, dense and sparse, and compares the two."""

from __future__ import annotations

import sys
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict
from tqdm import tqdm

import sparsity
from examples.mnist import config as config_lib
from examples.mnist.data import Digits, batches, load_digits
from examples.mnist.network import Network, make_network
from examples.mnist.report import print_report
from sparsity import sparsity_types


class Experiment(NamedTuple):
    """Two networks with the same initial weights, and what they learn from."""

    dense: Network
    sparse: Network
    train: Digits
    test: Digits
    config: ConfigDict


def make_experiment(config: ConfigDict) -> Experiment:
    """Returns all that is needed to train.

    Raises:
      ValueError: a value of the configuration makes no sense or does not fit the network.
    """
    config_lib.check(config)
    train, test = load_digits()
    num_steps = config.epochs * (len(train.labels) // config.batch_size)
    if not num_steps:
        raise ValueError(
            f"--config.batch_size must be at most {len(train.labels)}, the number of images to "
            f"train with, got {config.batch_size}."
        )
    name = config.sparsity.algorithm
    sparse = make_network(name, make_updater(config, num_steps), config, num_steps)
    dense = make_network("dense", sparsity.NoPruning(), config, num_steps)
    return Experiment(dense, sparse, train, test, config)


def make_updater(config: ConfigDict, num_steps: int) -> sparsity.BaseUpdater:
    """Returns the algorithm that the configuration names."""
    options = config.sparsity.to_dict()
    if options["update_start_step"] is None:
        options["update_start_step"] = num_steps // 5
    if options["update_end_step"] is None:
        options["update_end_step"] = max(num_steps * 3 // 5, options["update_start_step"])
    if options["update_end_step"] >= num_steps:
        raise ValueError(
            f"update_end_step must come before the end of training after {num_steps} steps, got "
            f"{options['update_end_step']}."
        )
    kind = sparsity_types.parse_sparsity_type(options["sparsity_type"])
    if options["sparsity"] is None:
        options["sparsity"] = 1 - kind.n / kind.m if isinstance(kind, sparsity.NByM) else 0.9
    if kind != sparsity.Unstructured():  # the first and the last layer stay dense
        options["filter_fn"] = lambda path, param: path[0] in ("conv2", "hidden") and param.ndim > 1
    return sparsity.create_updater_from_config(options)


def fit(network: Network, experiment: Experiment) -> Network:
    """Returns the network after training."""
    train, test, config = experiment.train, experiment.test, experiment.config
    num_steps = config.epochs * (len(train.labels) // config.batch_size)
    interval = 0.2 if sys.stderr.isatty() else 5  # seconds between two updates of the bar
    with tqdm(total=num_steps, desc=network.name, unit="step", mininterval=interval) as bar:
        for epoch in range(config.epochs):
            for batch in batches(train, config.batch_size, config.seed, epoch):
                state, loss = network.train_step(network.state, batch)
                network = network._replace(state=state)
                bar.update()
            zeros = sparsity.summarize_sparsity(network.used_params(), only_total_sparsity=True)
            bar.set_postfix(
                loss=f"{loss:.4f}",
                accuracy=f"{network.accuracy(network.state, test):.1%}",
                sparsity=f"{zeros['_total_sparsity']:.1%}",
                refresh=False,
            )
    return network


def run(experiment: Experiment) -> tuple[Network, Network]:
    """Trains both networks, prints the report and returns them, dense and sparse."""
    dense = fit(experiment.dense, experiment)
    sparse = fit(experiment.sparse, experiment)
    config = experiment.config
    print_report(
        *(dense, sparse, experiment.train, experiment.test),
        timed_steps=config.timed_steps,
        batch_size=config.batch_size,
    )
    return dense, sparse


def main() -> None:
    try:
        experiment = make_experiment(config_lib.from_command_line())
    except (ValueError, flags.Error) as error:
        sys.exit(f"error: {error}")
    run(experiment)


if __name__ == "__main__":
    main()
