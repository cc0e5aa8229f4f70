"""What training has come to: step times and tables."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import sparsity
from examples.mnist.data import Digits
from examples.mnist.network import Network


def time_steps(networks: list[Network], batch: Digits, repeats: int) -> list[float]:
    """Returns the median seconds of a training step of each network, measured in turn."""
    states = [jax.tree.map(jnp.copy, network.state) for network in networks]  # steps consume them
    seconds: list[list[float]] = [[] for _ in networks]
    for repeat in range(-3, repeats):  # the first three warm up
        for i, network in enumerate(networks):
            start = time.perf_counter()
            states[i], _ = jax.block_until_ready(network.train_step(states[i], batch))
            if repeat >= 0:
                seconds[i].append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def print_report(
    dense: Network, sparse: Network, train: Digits, test: Digits, timed_steps: int, batch_size: int
) -> None:
    """Prints the layers of the sparse network and both networks side by side."""
    networks = [dense, sparse]
    params = [network.used_params() for network in networks]
    layers = sparsity.sparsity_table(params[1], sparse.state.opt_state, sparse.updater)
    totals = [sparsity.summarize_sparsity(tree, only_total_sparsity=True) for tree in params]
    masks = [sparsity.get_sparse_state(network.state.opt_state).masks for network in networks]
    accuracies = [float(network.accuracy(network.state, test)) for network in networks]
    batch = Digits(train.images[:batch_size], train.labels[:batch_size])
    seconds = time_steps(networks, batch, timed_steps)

    table = Table("", *(network.name for network in networks))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("test accuracy", *(f"{accuracy:.1%}" for accuracy in accuracies))
    table.add_row("sparsity", *(f"{total['_total_sparsity']:.1%}" for total in totals))
    table.add_row("weights that are not zero", *(f"{total['_nparams_nnz']:,}" for total in totals))
    table.add_row(
        "bytes of masks",
        *(f"{sum(mask.nbytes for mask in jax.tree.leaves(tree)):,}" for tree in masks),
    )
    table.add_row("time of a step", *(f"{1000 * time:.1f} ms" for time in seconds))
    table.add_row("against dense", *(f"{time / seconds[0]:.2f}x" for time in seconds))
    print(layers)
    Console().print(table)
