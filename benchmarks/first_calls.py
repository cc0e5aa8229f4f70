"""First calls outside of jit, in new processes: CPU-seconds, and programs that XLA compiles.

    python -m benchmarks.first_calls [--quick] [--cases ...] [--write]

--quick runs a tree of three kernels; --write replaces the section of this benchmark in
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import jax
import numpy as np

import sparsity
from benchmarks import compile as trees, results

HEADING = "## First calls"
CASES = ("magnitude", "global", "coupled and shrink", "oneshot", "oneshot and ADMM")
# CPU-seconds and programs of the first call, and CPU-seconds of the second, as they were.
BEFORE = {
    "magnitude": (14.2, 86, 0.2),
    "global": (19.9, 175, 0.3),
    "coupled and shrink": (28.8, 432, 0.8),
    "oneshot": (44.5, 647, 2.0),
    "oneshot and ADMM": (76.3, 827, 2.5),
}
REPEATS = 3
# Threads of a BLAS that wait for each other use the processor, by chance twice as long as products.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def main() -> None:
    parser = results.Parser(__doc__, "a tree of three kernels")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.read()
    if options.one:
        print(json.dumps(measure(options.one, *options.cases)))
        return
    tree = "few" if options.quick else "resnet50"
    rows = []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            cache = {**CACHE, "JAX_COMPILATION_CACHE_DIR": folder}
            in_new_process(tree, case, cache)  # fills the folder
            pairs = [
                [in_new_process(tree, case, environment) for environment in ({}, cache)]
                for _ in range(1 if options.quick else REPEATS)
            ]
        first = [statistics.median(figures) for figures in zip(*(x for x, _ in pairs), strict=True)]
        rows.append([case, *first, statistics.median(cached[0] for _, cached in pairs)])
        print(*rows[-1], sep="\t", flush=True)
    text = report(rows)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def in_new_process(tree: str, case: str, environment: dict[str, str]) -> list[float]:
    """The figures of `measure` in a process with some variables of the environment."""
    command = [sys.executable, "-m", "benchmarks.first_calls", "--one", tree, "--cases", case]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **ONE_THREAD, **environment},
    )
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(tree: str, case: str) -> list[float]:
    """CPU-seconds and programs of the first call, then of the second."""
    programs = [0]

    def count(event: str, duration: float, **_: object) -> None:
        programs[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    run = make(tree, case)
    figures = []
    for _ in range(2):
        seconds, programs[0] = trees.cpu_seconds(), 0
        jax.block_until_ready(run())
        figures += [trees.cpu_seconds() - seconds, programs[0]]
    return figures


def make(tree: str, case: str) -> Callable[[], object]:
    """The call of a case."""
    narrow = 16 if case.startswith("oneshot") and tree != "few" else 1
    rng = np.random.default_rng(0)
    shapes = trees.shapes(tree)
    sizes = [tuple(n // narrow if n >= 64 else n for n in shape) for shape in shapes]
    drawn = [rng.standard_normal(x, dtype=np.float32) / np.sqrt(np.prod(x[:-1])) for x in sizes]
    params = {f"{i}": jax.device_put(x.astype(np.float32)) for i, x in enumerate(drawn)}
    model, inputs = trees.MODELS[tree]
    batch = jax.device_put(rng.standard_normal(inputs, dtype=np.float32))
    read_in_parts = {"2": None} if tree == "few" else None
    half = sparsity.Uniform(0.5, custom_sparsity_map=read_in_parts)
    if case.startswith("oneshot"):
        refit = sparsity.ADMM() if "ADMM" in case else None
        pruner = sparsity.WandaPruning(sparsity_distribution_fn=half)
        return lambda: sparsity.oneshot(pruner, model, params, [batch] * 2, refit=refit)[:2]
    if case != "coupled and shrink":
        scope = sparsity.Global() if case == "global" else sparsity.Layerwise()
        magnitude = sparsity.MagnitudePruning(scope=scope, sparsity_distribution_fn=half)
        return lambda: magnitude.instant_sparsify(params)
    graph = sparsity.trace(model, params, batch)
    coupled = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph), sparsity_distribution_fn=half
    )

    def cut() -> object:
        pruned, masks = coupled.instant_sparsify(params)
        small = sparsity.shrink(graph, pruned, masks)
        return small.params, small.masks

    return cut


def report(rows: list[list[object]]) -> str:
    """The section of RESULTS.md."""
    head = ["call", "first, CPU s", "programs", "again", "with a cache", "before", "programs"]
    head.append("again")
    cells = []
    for case, first, programs, again, _, cached in rows:
        spent = [f"{float(str(x)):.2f}" for x in (first, again, cached)]
        before = [str(x) for x in BEFORE.get(str(case), ("-",) * 3)]
        cells.append([str(case), spent[0], str(programs), *spent[1:], *before])
    return (
        f"{HEADING}\n\n{results.measured_on()} One new process each, without a cache of programs: "
        "masks of a ResNet-50 (54 kernels, 25.5 M weights), coupled channels with the cut, and "
        "one-shot pruning by Wanda of the same network at a 16th of its channels, two batches. "
        "`again` is the second call in the process, `with a cache` the first one where "
        "`jax_compilation_cache_dir` holds the programs of an earlier process. `before` is the "
        "library in which all of this was XLA. CPU-seconds on a shared machine, medians of "
        f"{REPEATS} processes in which the BLAS of numpy has one thread.\n\n"
        f"{results.table(head, cells)}"
    )


if __name__ == "__main__":
    main()
