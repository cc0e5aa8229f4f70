"""Measures which channels to cut: as many of every group, or the best per multiply-add.

    python -m baselines.across [--report]

The network of `digits_cnn` is trained, loses whole channels at once by their magnitudes, is cut,
and is fine-tuned at its smaller size. Only the option `across` of `sparsity.Coupled` differs.
Results are stored as soon as they are there. --report prints the table, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from baselines import channels, digits_cnn, report, store, training
from baselines.grown_weights import describe

STEPS, TUNING, BATCH, RATE, SEEDS = 400, 100, 50, 2e-3, 3
SHARES = (0.3,)  # of the multiply-adds
WAYS = {"as many of every group": False, "`across=True`": True}
RESULTS = store.RESULTS / "across.json"

Model = Callable[[chex.ArrayTree, jax.Array], jax.Array]


def fit(key: jax.Array, model: Model, params: chex.ArrayTree, steps: int) -> chex.ArrayTree:
    """Returns the parameters after `steps` steps of Adam."""
    images, labels, _, _ = map(jnp.asarray, digits_cnn.data())
    tx = optax.adam(training.warmup_cosine(RATE, steps))

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        chosen = jax.random.randint(key, (BATCH,), 0, len(images))

        def loss(params: chex.ArrayTree) -> jax.Array:
            return training.cross_entropy(model(params, images[chosen]), labels[chosen])

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: chex.ArrayTree) -> chex.ArrayTree:
        return jax.lax.scan(step, (params, tx.init(params)), jax.random.split(key, steps))[0][0]

    return run(params)


def find_accuracy(model: Model, params: chex.ArrayTree) -> float:
    """Returns the accuracy on test images, in percent."""
    _, _, images, labels = digits_cnn.data()
    predicted = jax.jit(model)(params, images).argmax(-1)
    return 100 * float(np.mean(np.asarray(predicted) == labels))


def measure(seed: int) -> dict[str, list[float]]:
    """Returns {row: accuracy before and after fine-tuning, share of the multiply-adds}."""
    start, first, second = jax.random.split(jax.random.key(seed), 3)
    model, params = channels.digits_model, digits_cnn.init(start)
    graph = sparsity.trace(model, params, jax.ShapeDtypeStruct((1, 28, 28, 1), jnp.float32))
    params = fit(first, model, params, STEPS)
    rows = {
        "dense": [
            find_accuracy(model, params),
            find_accuracy(model, fit(second, model, params, TUNING)),
            1.0,
        ]
    }
    for share in SHARES:
        for way, across in WAYS.items():
            pruner = sparsity.MagnitudePruning(
                scope=sparsity.Coupled(graph, across=across),
                sparsity_distribution_fn=sparsity.budget(graph, macs=share),
            )
            small = sparsity.shrink(graph, *pruner.instant_sparsify(params))
            tuned = fit(second, small.apply, small.params, TUNING)
            accuracies = [
                find_accuracy(small.apply, small.params),
                find_accuracy(small.apply, tuned),
            ]
            rows[f"{share} {way}"] = [*accuracies, small.macs() / graph.macs()]
    return rows


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Returns a Markdown table of means and standard deviations over seeds."""
    head = ["channels", "multiply-adds", "after the cut, %", "after fine-tuning, %"]
    rows = []
    for name in next(iter(results.values())):
        before, after, shares = zip(*(rows[name] for rows in results.values()), strict=True)
        way = name.partition(" ")[2] or name
        rows.append([way, f"{100 * max(shares):.1f} %", describe(before), describe(after)])
    return report.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="print the table, train nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for seed in () if options.report else range(SEEDS):
        if str(seed) not in results:
            results[str(seed)] = measure(seed)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
