"""What training has come to: step times and tables."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import sparsity
from examples.mnist import data
from examples.mnist.network import Network, TrainState


def time_steps(
    networks: dict[str, Network], trained: dict[str, TrainState], batch: data.Digits, repeats: int
) -> dict[str, float]:
    """Returns the median seconds of a training step of each network, measured in turn."""
    states = jax.tree.map(jnp.copy, trained)  # steps consume them
    seconds: dict[str, list[float]] = {role: [] for role in networks}
    for repeat in range(-3, repeats):  # the first three warm up
        for role, network in networks.items():
            start = time.perf_counter()
            states[role], _ = jax.block_until_ready(network.train_step(states[role], batch))
            if repeat >= 0:
                seconds[role].append(time.perf_counter() - start)
    return {role: statistics.median(times) for role, times in seconds.items()}


def print_report(
    networks: dict[str, Network],
    trained: dict[str, TrainState],
    train: data.Digits,
    test: data.Digits,
    batch_size: int,
) -> None:
    """Prints the layers of the sparse network, and all networks side by side."""
    params = {role: network.used_params(trained[role]) for role, network in networks.items()}
    sparse = trained["sparse"].opt_state, networks["sparse"].updater
    totals = [
        sparsity.summarize_sparsity(tree, only_total_sparsity=True) for tree in params.values()
    ]
    masks = [sparsity.get_sparse_state(state.opt_state).masks for state in trained.values()]
    accuracies = [network.accuracy(trained[role], test) for role, network in networks.items()]
    batch = data.batch(train, batch_size, seed=0, step=0)
    seconds = time_steps(networks, trained, batch, repeats=30)

    table = Table("", *(network.name for network in networks.values()))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("test accuracy", *(f"{accuracy:.1%}" for accuracy in accuracies))
    table.add_row("sparsity", *(f"{total['_total_sparsity']:.1%}" for total in totals))
    table.add_row("weights that are not zero", *(f"{total['_nparams_nnz']:,}" for total in totals))
    table.add_row(
        "bytes of masks",
        *(f"{sum(mask.nbytes for mask in jax.tree.leaves(tree)):,}" for tree in masks),
    )
    table.add_row("time of a step", *(f"{1000 * time:.1f} ms" for time in seconds.values()))
    table.add_row("against dense", *(f"{t / seconds['dense']:.2f}x" for t in seconds.values()))
    print(sparsity.sparsity_table(params["sparse"], *sparse))
    Console().print(table)


def print_prunings(updater: sparsity.EpochStrategy, evaluations: list[dict[str, Any]]) -> None:
    """Prints the test accuracy before and after each pruning, and before the next one."""
    table = Table("pruning after epoch", "before", "right after", "recovered", "dense by then")
    for column in table.columns[1:]:
        column.justify = "right"
    starts = [epoch * updater.steps_per_epoch for epoch in sorted(updater.strategy)]
    for start, end in zip(starts, [*starts[1:], evaluations[-1]["step"]], strict=True):
        before = [row for row in evaluations if row["step"] <= start][-1:]
        after = [row for row in evaluations if start < row["step"] <= end]
        rows = [row["sparse"] for row in (*before, after[0], after[-1])] + [after[-1]["dense"]]
        epoch, *shown = start // updater.steps_per_epoch, *(f"{r['accuracy']:.1%}" for r in rows)
        table.add_row(str(epoch), *shown)
    Console().print(table)
