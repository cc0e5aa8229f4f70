"""Memory and time of a training step of kept values, against masked and dense steps.

Scanned layers of 1024 inputs and outputs, float32, adam, donated. Bytes are those of arguments and
temporaries of the compiled step. Steps take turns in one process; the CPU time of all their threads
depends less on other work of the machine than their duration.

    python -m benchmarks.compact_steps [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Compact training steps"
SPARSITIES = (0.8, 0.9, 0.95)
ROWS = (16, 128, 1024)
GROUP = 16
WAYS = ("masked", "values", "grouped")


def main() -> None:
    options = results.Parser(__doc__, "small layers, few rounds").read()
    layers, size, rounds = (2, 64, 2) if options.quick else (4, 1024, 5)
    rows = []
    for count in ROWS[: 1 if options.quick else None]:
        for cells in measure(layers, size, count, rounds):
            rows.append(cells)
            print(*cells, sep="\t", flush=True)
    text = report(layers, size, rows)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def model(params: chex.ArrayTree, x: jax.Array) -> jax.Array:
    """Residual layers: x is [rows, size], params["layers"] [layers, size, size]."""

    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x @ weights), None

    return jax.lax.scan(layer, x, params["layers"])[0]


def measure(layers: int, size: int, rows: int, rounds: int) -> list[list[str]]:
    """Returns a row of the table for each sparsity, after one of the dense step."""
    x = jax.random.normal(jax.random.key(0), (rows, size))
    shape = (layers, size, size)
    params = {"layers": jax.random.normal(jax.random.key(1), shape) / size**0.5}
    graph, tx = sparsity.trace(model, params, x), optax.adam(1e-3)
    runs = [make_run(lambda _, params, x: model(params, x), tx, params, x)]
    for target in SPARSITIES:
        unstructured, fan_in = (
            sparsity.MagnitudePruning(
                batch_axes=1,
                sparsity_distribution_fn=sparsity.Uniform(target, filter_fn=graph.is_weight),
                sparsity_type=pattern,
            )
            for pattern in (sparsity.Unstructured(), graph.fan_in(GROUP))
        )
        pruned, masks = unstructured.instant_sparsify(params)
        wrapped = sparsity.StaticRandomSparse().wrap_optax(tx, masks=masks)
        runs.append(make_run(lambda _, params, x: model(params, x), wrapped, pruned, x))
        for pair in ((pruned, masks), fan_in.instant_sparsify(params)):
            kept = sparsity.compact(graph, *pair)
            runs.append(make_run(lambda m, p, x: m.apply(p, x), tx, kept.params, x, kept))
    seconds = time_in_turn([run for run, _ in runs], rounds)
    nbytes = [each / (layers * size * size) for _, each in runs]
    lines = [[f"{rows}", "dense", *describe(nbytes[:1]), "", "", "1.00", "", ""]]
    for i, target in enumerate(SPARSITIES):
        chosen = slice(1 + i * len(WAYS), 1 + (i + 1) * len(WAYS))
        ratios = [each / seconds[0] for each in seconds[chosen]]
        times = [f"{ratio:.2f}" for ratio in ratios]
        lines.append([f"{rows}", f"{100 * target:.0f} %", *describe(nbytes[chosen]), *times])
    return lines


def time_in_turn(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Returns the median CPU-seconds of each run."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, measured in zip(runs, seconds, strict=True):
            jax.block_until_ready(run())  # wakes threads and caches after a rival
            start = time.process_time()
            jax.block_until_ready(run())
            measured.append(time.process_time() - start)
    return [statistics.median(measured) for measured in seconds]


def describe(nbytes: list[float]) -> list[str]:
    return [f"{each:.1f}" for each in nbytes]


def make_run(
    apply: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
    params: chex.ArrayTree,
    x: jax.Array,
    kept: Any = None,
) -> tuple[Callable[[], object], float]:
    """Returns a run of a donated training step, and the bytes that it needs."""

    def step(
        params: chex.ArrayTree, state: chex.ArrayTree, kept: Any, x: jax.Array
    ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        grads = jax.grad(lambda params: jnp.mean((apply(kept, params, x) - x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    carry = jax.tree.map(jnp.copy, params), tx.init(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carry, kept, x).compile()
    memory = compiled.memory_analysis()

    def run() -> object:
        nonlocal carry
        carry = compiled(*carry, kept, x)
        return carry

    return run, memory.argument_size_in_bytes + memory.temp_size_in_bytes


def report(layers: int, size: int, rows: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    head = [f"{kind}, {way}" for kind in ("bytes", "time") for way in WAYS]
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} A step of adam through {layers} scanned layers of {size} x "
            f"{size}, float32, donated. Bytes of arguments and temporaries for each weight, "
            "activations included; CPU time of a step over that of a dense step, medians in turn. "
            f"Values are of unstructured masks, groups of FanIn({GROUP}).",
            "",
            results.table(["rows", "sparsity", *head], rows),
        ]
    )


if __name__ == "__main__":
    main()
