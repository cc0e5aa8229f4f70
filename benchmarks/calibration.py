"""Time of reconstructing a layer, against its Cholesky factor and its triangular inverse.

All runs are measured in turn on one thread, in CPU time, which other processes disturb least; the
figures are the best ones.

    python -m benchmarks.calibration [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import sparsity
from benchmarks import results
from sparsity.calibration import prune

HEADING = "## Reconstruction"


@jax.jit
def factors(gram: jax.Array) -> jax.Array:
    """What SparseGPT cannot do without: the Cholesky factor of the Gram matrix, inverted."""
    lower = jax.lax.linalg.cholesky(gram, symmetrize_input=False)
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    return jax.lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True)


def half(params: jax.Array) -> float:
    """A distribution for a single leaf."""
    return 0.5


def make_runs(size: int) -> dict[str, Callable[[], object]]:
    """Runs by name, of a layer of so many inputs and outputs."""
    keys = jax.random.split(jax.random.key(0))
    x, kernel = (
        jax.random.normal(keys[0], (2 * size, size)),
        jax.random.normal(keys[1], (size,) * 2),
    )
    seen = sparsity.Statistic(gram=x.T @ x, count=2 * size, contracting=(0,), output=(1,))
    wanda = sparsity.WandaPruning(sparsity_distribution_fn=half)
    sweeps = {
        f"SparseGPT, {name}": sparsity.SparseGPTPruning(
            sparsity_distribution_fn=half, sparsity_type=kind, block_size=block
        )
        for name, kind, block in (
            ("blocks of 128", sparsity.Unstructured(), 128),
            ("blocks of 32", sparsity.Unstructured(), 32),
            ("one block", sparsity.Unstructured(), size),
            ("2:4", sparsity.NByM(2, 4, axis=0), 128),
        )
    }
    refits = {
        "Wanda": None,
        "Wanda, ADMM": sparsity.ADMM(),
        "Wanda, ADMM, 15 gradual": sparsity.ADMM(gradual=15),
        "Wanda, least squares": sparsity.LeastSquares(),
    }
    return {
        "Cholesky and triangular inverse": lambda: factors(seen.gram),
        **{
            name: lambda pruner=pruner: pruner.instant_sparsify(kernel, statistics={(): seen})
            for name, pruner in sweeps.items()
        },
        **{
            name: lambda refit=refit: prune(wanda, kernel, {(): seen}, refit)
            for name, refit in refits.items()
        },
    }


def measure(size: int, rounds: int) -> list[list[str]]:
    """Returns a row for each run: CPU milliseconds, and the ratio to the factors."""
    runs = make_runs(size)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds + 1):  # the first one compiles
        for name, run in runs.items():
            start = time.process_time()
            jax.block_until_ready(run())
            best[name] = min(best[name], time.process_time() - start)
    unit = next(iter(best.values()))
    return [[name, f"{1000 * t:.0f}", f"{t / unit:.1f}"] for name, t in best.items()]


def report(size: int, rows: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    table = results.table(["layer", "CPU ms", "of the factors"], rows)
    about = (
        f"{results.measured_on()} A layer of {size} x {size}, float32, 50 %, and the Gram matrix "
        f"of {2 * size} rows; checks and masks included. One "
        "thread, best of runs measured in turn."
    )
    return f"{HEADING}\n\n{about}\n\n{table}"


def main() -> None:
    options = results.Parser(__doc__, "a small layer").read()
    # Read when the first array is made.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    os.environ |= {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"}
    size = 64 if options.quick else 1024
    text = report(size, measure(size, 2 if options.quick else 5))
    print(text)
    if options.write:
        results.write_section(text)


if __name__ == "__main__":
    main()
