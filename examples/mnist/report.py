"""What training has come to: step times and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import sparsity
from examples.mnist import data
from examples.mnist.compacting import CompactState
from examples.mnist.network import Network, TrainState


def stepping(network: Network, state: TrainState, batch: data.Digits) -> Callable[[], Any]:
    """Returns a program that takes a training step from a copy of a state, then from its result."""
    states = [jax.tree.map(jnp.copy, state)]  # steps consume them

    def step() -> TrainState:
        states[0], _ = network.train_step(states[0], batch)
        return states[0]

    return step


def stored_places(state: Any) -> Any:
    """Returns the masks of a state, or the positions that a compact network has instead."""
    if isinstance(state, CompactState):
        return state.model.indices
    return sparsity.get_sparse_state(state.opt_state).masks


def count_bytes(network: Network, state: Any, batch: data.Digits) -> int:
    """Returns the bytes of a training step: arguments, and temporaries of the compiled program."""
    memory = network.train_step.lower(state, batch).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def print_report(
    networks: dict[str, Network],
    trained: dict[str, TrainState],
    steps: list[tuple[Network, Any]],
    batch: data.Digits,
    test: data.Digits,
) -> None:
    """Prints the layers of the sparse network, and all networks side by side.

    Args:
      networks: the trained networks by role.
      trained: their states, dense with masks.
      steps: networks, and states as they train, to measure a step: the trained networks first.
      batch: images of a step.
      test: images to test with.
    """
    params = {role: network.used_params(trained[role]) for role, network in networks.items()}
    sparse = trained["sparse"].opt_state, networks["sparse"].updater
    totals = [
        sparsity.summarize_sparsity(tree, only_total_sparsity=True) for tree in params.values()
    ]
    accuracies = [network.accuracy(trained[role], test) for role, network in networks.items()]
    programs = [stepping(network, state, batch) for network, state in steps]
    seconds = sparsity.reports.time_in_turn(*programs, rounds=30)

    table = numbers("", *(network.name for network, _ in steps))
    table.add_row("test accuracy", *(f"{accuracy:.1%}" for accuracy in accuracies))
    table.add_row("sparsity", *(f"{total['_total_sparsity']:.1%}" for total in totals))
    table.add_row("weights that are not zero", *(f"{total['_nparams_nnz']:,}" for total in totals))
    places = [stored_places(state) for _, state in steps]
    what = "masks or positions" if len(steps) > len(networks) else "masks"
    table.add_row(
        f"bytes of {what}",
        *(f"{sum(leaf.nbytes for leaf in jax.tree.leaves(tree)):,}" for tree in places),
    )
    if len(steps) > len(networks):
        sizes = [count_bytes(network, state, batch) for network, state in steps]
        table.add_row("bytes of a step", *(f"{size:,}" for size in sizes))
        table.add_row("against dense", *(f"{size / sizes[0]:.2f}x" for size in sizes))
    table.add_row("time of a step", *(f"{1000 * time:.1f} ms" for time in seconds))
    table.add_row("against dense", *(f"{time / seconds[0]:.2f}x" for time in seconds))
    print(sparsity.sparsity_table(params["sparse"], *sparse))
    Console().print(table)


def print_cut(
    small: sparsity.shrinking.Small[Any],
    before: Network,
    after: Network,
    batch: data.Digits,
    test: data.Digits,
) -> None:
    """Prints what the cut has made of every layer, and what that saves of the time."""
    steps = [stepping(network, network.init(), batch) for network in (before, after)]
    images = test.images[:1000]
    seconds = {
        "training step": sparsity.reports.time_in_turn(*steps, rounds=30),
        f"inference of {len(images):,} images": small.measure(before.model.init(), images),
    }
    print(small.report(seconds))


def print_prunings(updater: sparsity.EpochStrategy, evaluations: list[dict[str, Any]]) -> None:
    """Prints the test accuracy before and after each pruning, and before the next one."""
    table = numbers("pruning after epoch", "before", "right after", "recovered", "dense by then")
    starts = [epoch * updater.steps_per_epoch for epoch in sorted(updater.strategy)]
    for start, end in zip(starts, [*starts[1:], evaluations[-1]["step"]], strict=True):
        before = [row for row in evaluations if row["step"] <= start][-1:]
        after = [row for row in evaluations if start < row["step"] <= end]
        rows = [row["sparse"] for row in (*before, after[0], after[-1])] + [after[-1]["dense"]]
        epoch, *shown = start // updater.steps_per_epoch, *(f"{r['accuracy']:.1%}" for r in rows)
        table.add_row(str(epoch), *shown)
    Console().print(table)


def numbers(*heads: str) -> Table:
    """Returns an empty table, whose columns but the first hold numbers."""
    table = Table(*heads)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
