"""Time of products with groups of outputs that share their inputs, against dense products.

A layer of 2048 inputs and outputs, float32. The forward pass is y = x @ W; with gradients are y and
the gradients of W (or of the kept values) and of x. Dense and grouped programs are measured in
turn in one process; the figures are medians of the time of dense over that of grouped.

    python -m benchmarks.grouped [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from sparsity.compacting import grouped_products as grouped

HEADING = "## Groups of outputs"
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
ROWS = (1, 16, 128, 512)
GROUPS = (1, 4, 16, 64)

Run = Callable[[], object]


def main() -> None:
    options = results.Parser(__doc__, "a small layer, few rounds").read()
    size, rounds = (256, 3) if options.quick else (2048, 9)
    rows = []
    for sparsity, count in itertools.product(SPARSITIES, ROWS):
        ratios = measure(size, count, sparsity, rounds)
        rows.append([f"{100 * sparsity:.0f} %", str(count), *(f"{x:.1f}" for x in ratios)])
        print(*rows[-1], sep="\t", flush=True)
    text = report(size, rows)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def measure(size: int, rows: int, sparsity: float, rounds: int) -> list[float]:
    """Returns times of dense over grouped: of all groups forward, then of all with gradients."""
    rng = np.random.default_rng(0)
    weights, x, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((size, size), (rows, size), (rows, size))
    )
    dense = make_runs(lambda weights, x: x @ weights, weights, x, dy)
    runs = {(0, name): run for name, run in dense.items()}
    for group in GROUPS:

        def multiply(values: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
            return grouped.grouped_product(values, indices, x, size)

        indices, values = draw(size, group, sparsity, rng)
        sparse = make_runs(multiply, values, x, dy, indices)
        runs |= {(group, name): run for name, run in sparse.items()}
    return compare(runs, rounds)


def draw(
    size: int, group: int, sparsity: float, rng: np.random.Generator
) -> tuple[jax.Array, jax.Array]:
    """Returns random indices [groups, k] and values [groups, k, group]."""
    k = round(size * (1 - sparsity))
    indices = [np.sort(rng.permutation(size)[:k]) for _ in range(size // group)]
    values = rng.normal(size=(size // group, k, group))
    return jnp.asarray(np.stack(indices), jnp.uint16), jnp.asarray(values, jnp.float32)


def make_runs(
    product: Callable[..., jax.Array],
    weights: jax.Array,
    x: jax.Array,
    dy: jax.Array,
    *indices: jax.Array,
) -> dict[str, Run]:
    """Returns compiled runs: the product, and the product with its gradients."""

    def with_gradients(
        weights: jax.Array, x: jax.Array, dy: jax.Array, *indices: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y, pull = jax.vjp(lambda weights, x: product(weights, x, *indices), weights, x)
        return y, pull(dy)

    forward_args, args = (weights, x, *indices), (weights, x, dy, *indices)
    forward = jax.jit(product).lower(*forward_args).compile()
    both = jax.jit(with_gradients).lower(*args).compile()
    return {"forward": lambda: forward(*forward_args), "both": lambda: both(*args)}


def compare(runs: dict[tuple[int, str], Run], rounds: int) -> list[float]:
    """Returns medians of the ratio of dense (group 0) to each group in the same round."""
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            jax.block_until_ready(run())  # wakes threads and caches after a rival
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[key].append(time.perf_counter() - start)
    return [
        statistics.median(
            dense / sparse
            for dense, sparse in zip(seconds[0, name], seconds[group, name], strict=True)
        )
        for name in ("forward", "both")
        for group in GROUPS
    ]


def report(size: int, rows: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    kinds = [f"{kind}, {group}" for kind in ("forward", "gradients") for group in GROUPS]
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} A product with a layer of {size} x {size}, float32, whose "
            "groups of neighbouring outputs read the same inputs, and the product with the "
            "gradients of its kept values and inputs. Time of dense over time of grouped, by "
            "size of the group: medians of the ratio in rounds measured in turn.",
            "",
            results.table(["sparsity", "rows", *kinds], rows),
        ]
    )


if __name__ == "__main__":
    main()
