"""Measures the first steps of grown weights: Adam as it is, and with an age for each weight.

    python -m baselines.grown_weights [--report] [--seeds N]

A weight that SET or RigL grows has moments of 0 under an old count, so that its first step is
(1 - b1) / sqrt(1 - b2) = 3.2 learning rates. `aged_adamw` counts the steps of each weight instead.
Tasks, recipes and seeds are those of `baselines.run`, whose results hold most rows of Adam as it
is. Other rows are stored once they are complete, with as many seeds as they were measured with.
--report prints the table, and trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from typing import Any, NamedTuple
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import optax

from baselines import digits_cnn, report, store, topics_transformer, training

TASKS = (digits_cnn.TASK, topics_transformer.TASK)
ALGORITHMS, SPARSITIES = ("rigl", "set"), (0.8, 0.9)
RESULTS = store.RESULTS / "grown_weights.json"


class AgedState(NamedTuple):
    """State of `scale_by_aged_adam`; all trees are like the parameters.

    Attributes:
      mu: means of gradients.
      nu: means of squared gradients.
      age: number of steps since a weight grew.
    """

    mu: chex.ArrayTree
    nu: chex.ArrayTree
    age: chex.ArrayTree


def scale_by_aged_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Returns Adam whose bias correction counts the steps of each weight."""

    def init(params: chex.ArrayTree) -> AgedState:
        return AgedState(*(jax.tree.map(jnp.zeros_like, params) for _ in AgedState._fields))

    def update(
        grads: chex.ArrayTree, state: AgedState, params: chex.ArrayTree | None = None
    ) -> tuple[chex.ArrayTree, AgedState]:
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        age = jax.tree.map(lambda age: age + 1, state.age)

        def scale(mu: jax.Array, nu: jax.Array, age: jax.Array) -> jax.Array:
            return mu / (1 - b1**age) / (jnp.sqrt(nu / (1 - b2**age)) + eps)

        return jax.tree.map(scale, mu, nu, age), AgedState(mu, nu, age)

    return optax.GradientTransformation(init, update)


def aged_adamw(rate: optax.ScalarOrSchedule, weight_decay: float) -> optax.GradientTransformation:
    """Returns AdamW whose bias correction counts the steps of each weight."""
    return optax.chain(
        scale_by_aged_adam(),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def train(task: training.Task, algorithm: str, target: float, way: str, seeds: int) -> list[float]:
    """Returns the metric of each seed."""
    task = dataclasses.replace(task, seeds=seeds)
    tx = aged_adamw if way == "aged" else optax.adamw
    with mock.patch.object(optax, "adamw", tx):  # the optimizer that recipes name
        return training.run_seeds(task, algorithm, target)["metric"]


def measure_all(results: dict[str, Any], seeds: int) -> None:
    """Measures all rows that have no result yet."""
    for task in TASKS:
        stored = store.load(task)
        for target in SPARSITIES:
            for algorithm in ALGORITHMS:
                for way in ("adam", "aged"):
                    name = f"{task.name} {algorithm} {target} {way}"
                    if name in results:
                        continue
                    if way == "adam" and (algorithm, target) in stored:
                        results[name] = stored[algorithm, target]["metric"]
                    else:
                        results[name] = train(task, algorithm, target, way, seeds)
                    print(name, results[name], flush=True)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of means and standard deviations."""
    head = ["task", "algorithm", "sparsity", "Adam as it is", "an age for each weight"]
    rows = []
    for task in TASKS:
        for target in SPARSITIES:
            for algorithm in ALGORITHMS:
                names = [f"{task.name} {algorithm} {target} {way}" for way in ("adam", "aged")]
                cells = [describe(results.get(name, [])) for name in names]
                rows.append([task.name, f"`{algorithm}`", f"{100 * target:.0f} %", *cells])
    return report.table(head, rows)


def describe(values: list[float]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f} (1 seed)"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="print the table, train nothing")
    parser.add_argument("--seeds", type=int, default=3, help="of rows that have no result yet")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not options.report:
        measure_all(results, options.seeds)
    print(table(results))


if __name__ == "__main__":
    main()
