"""Time and memory of a training step of every algorithm, against the same step without it.

An MLP 1024-4096-1024, batch 64, Adam, donated. Dense and sparse steps are measured in turn in one
process; the figures are medians. An ordinary step and an update step are the same compiled program
at another count.

    python -m benchmarks.train_step [--quick] [--algorithms NAME ...] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Training step"
UPDATE_FREQ = 1000

Params = dict[str, jax.Array]
State = tuple[Params, sparsity.SparseState]


def main() -> None:
    parser = results.Parser(__doc__, "few steps of a small network")
    parser.add_argument("--algorithms", nargs="+", default=sparsity.all_algorithm_names())
    options = parser.read()
    sizes = (128, 512, 128) if options.quick else (1024, 4096, 1024)
    ordinary_steps, update_steps = (10, 3) if options.quick else (60, 9)
    rows = []
    for name in options.algorithms:
        for skip in (False, True):
            row = measure(make_updater(name, skip), sizes, ordinary_steps, update_steps)
            rows.append([name, "on" if skip else "off", *row])
            print(*rows[-1], sep="\t", flush=True)
    text = report(sizes, rows, measure_import(3 if options.quick else 9))
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def make_updater(name: str, skip_gradients: bool) -> sparsity.BaseUpdater:
    """Returns an updater at 90 % that changes masks every `UPDATE_FREQ` steps."""
    config = {"algorithm": name, "sparsity": 0.9, "skip_gradients": skip_gradients}
    scheduler = sparsity.PeriodicSchedule(UPDATE_FREQ)
    return sparsity.create_updater_from_config(config | {"scheduler": scheduler})


def measure(
    updater: sparsity.BaseUpdater, sizes: tuple[int, ...], ordinary_steps: int, update_steps: int
) -> list[str]:
    """Returns ratios to a dense step, the time of a dense step and MiB of temporaries."""
    batch = jax.random.normal(jax.random.key(1), (64, sizes[0]))
    dense_state, dense_step, dense_temp = compile_step(sparsity.NoPruning(), sizes, batch)
    state, step, temp = compile_step(updater, sizes, batch)
    dense: list[float] = []
    ratios: dict[bool, list[float]] = {False: [], True: []}
    warm_up = 3
    for i in range(warm_up + ordinary_steps + update_steps):
        is_update = i >= warm_up + ordinary_steps or i == 0
        dense_seconds, dense_state = timed(dense_step, dense_state, batch)
        count = jnp.int32(UPDATE_FREQ * i if is_update else UPDATE_FREQ * i + 1)
        state = (state[0], state[1]._replace(count=count))
        seconds, state = timed(step, state, batch)
        if i >= warm_up:
            dense.append(dense_seconds)
            ratios[is_update].append(seconds / dense_seconds)
    return [
        f"{statistics.median(ratios[False]):.2f}",
        f"{statistics.median(ratios[True]):.2f}",
        f"{1000 * statistics.median(dense):.1f}",
        f"{temp / 2**20:.1f}",
        f"{dense_temp / 2**20:.1f}",
    ]


def compile_step(
    updater: sparsity.BaseUpdater, sizes: tuple[int, ...], batch: jax.Array
) -> tuple[State, Callable[[State, jax.Array], State], int]:
    """Returns an initial state, a compiled donated training step and its bytes of temporaries."""
    tx = updater.wrap_optax(optax.adam(1e-3))
    params = {
        f"w{i}": jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5
        for i, shape in enumerate(itertools.pairwise(sizes))
    }
    params |= {f"b{i}": jnp.zeros(size) for i, size in enumerate(sizes[1:])}

    def loss_fn(params: Params, opt_state: Any, batch: jax.Array) -> jax.Array:
        params = updater.pre_forward_update(params, opt_state)
        hidden = jax.nn.relu(batch @ params["w0"] + params["b0"])
        return jnp.mean((hidden @ params["w1"] + params["b1"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: jax.Array) -> State:
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, opt_state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return updater.post_gradient_update(params, opt_state), opt_state

    state = params, tx.init(params)
    compiled = step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    return state, compiled, memory.temp_size_in_bytes if memory else 0


def timed(
    step: Callable[[State, jax.Array], State], state: State, batch: jax.Array
) -> tuple[float, State]:
    jax.block_until_ready(state)
    start = time.perf_counter()
    state = jax.block_until_ready(step(state, batch))
    return time.perf_counter() - start, state


def measure_import(repeats: int) -> tuple[float, float]:
    """Returns median seconds of importing jax, optax and chex, and what sparsity adds to them."""
    code = (
        "import time; a = time.perf_counter(); import jax, optax, chex; b = time.perf_counter(); "
        "import sparsity; print(b - a, time.perf_counter() - b)"
    )
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    outputs = [run([sys.executable, "-c", code]).stdout.split() for _ in range(repeats)]
    others, added = zip(*outputs, strict=True)
    return statistics.median(map(float, others)), statistics.median(map(float, added))


def report(sizes: tuple[int, ...], rows: list[list[str]], imports: tuple[float, float]) -> str:
    """Returns the section of RESULTS.md."""
    head = ["algorithm", "skip_gradients", "ordinary step", "update step", "dense step, ms"]
    head += ["temporaries, MiB", "dense, MiB"]
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} An MLP {'-'.join(map(str, sizes))} at 90 %, batch 64, Adam, "
            "donated. Ordinary and update steps: medians of the ratio to a dense step that is "
            "measured in turn.",
            "",
            results.table(head, rows),
            "",
            f"`import sparsity` takes {imports[1]:.3f} s after jax, optax and chex, which take "
            f"{imports[0]:.2f} s.",
        ]
    )


if __name__ == "__main__":
    main()
