"""Mask updates of compact models beside their steps and those of wrapped models.

RigL, SET and SRigL at 90 %, Adam, a stack of layers under one scan, or as many unrolled parameters:

- memory: arguments and temporaries of the compiled program, donated, in bytes for each weight.
- time: medians of the ratio to a compact step that is measured in turn, in one process.
- compilation: seconds.

    python -m benchmarks.compact_move [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Moves of compact masks"
HEAD = [
    "layers", "algorithm", "program", "memory, B/weight", "time, compact steps", "compilation, s",
]  # fmt: skip
TX = optax.adam(1e-3)
BATCH = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and the pruner of its masks.

    Attributes:
      name: for the table.
      is_scanned: whether the layers are one parameter.
      algorithm: makes the pruner.
      pattern: pattern of the masks.
    """

    name: str
    is_scanned: bool
    algorithm: Callable[..., sparsity.BaseUpdater]
    pattern: sparsity.SparsityType


SRIGL = functools.partial(sparsity.SRigL, min_salient=None)
CASES = [
    Case("scanned", True, sparsity.SET, sparsity.Unstructured()),
    Case("scanned", True, sparsity.RigL, sparsity.Unstructured()),
    Case("scanned", True, sparsity.RigL, sparsity.FanIn(16)),
    Case("scanned", True, SRIGL, sparsity.Unstructured()),
    Case("unrolled", False, sparsity.SET, sparsity.Unstructured()),
    Case("unrolled", False, sparsity.RigL, sparsity.Unstructured()),
    Case("unrolled", False, sparsity.RigL, sparsity.FanIn(16)),
    Case("unrolled", False, SRIGL, sparsity.Unstructured()),
]


def main() -> None:
    options = results.Parser(__doc__, "few rounds of small layers").read()
    layers, width, rounds = (2, 32, 2) if options.quick else (8, 1024, 8)
    rows = []
    for case in CASES:
        for row in measure(case, layers, width, rounds):
            rows.append(row)
            print(*row, sep="\t", flush=True)
    text = report(rows, layers, width)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def measure(case: Case, layers: int, width: int, rounds: int) -> list[list[str]]:
    """Returns rows for the step of the wrapped model that moves masks, the step, and the move."""
    shape = (layers, width, width)
    stack = jax.random.normal(jax.random.key(0), shape) / width**0.5
    params: Any = stack if case.is_scanned else dict(enumerate(stack))
    x = jax.random.normal(jax.random.key(1), (BATCH, width))

    def network(params: Any, x: jax.Array) -> jax.Array:
        if case.is_scanned:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), x)

    def loss(apply: Callable[..., jax.Array], params: Any) -> jax.Array:
        return jnp.mean(jnp.square(apply(params, x) - 1))

    pruner = case.algorithm(
        scheduler=sparsity.PeriodicSchedule(1),
        sparsity_distribution_fn=sparsity.Uniform(0.9),
        sparsity_type=case.pattern,
        batch_axes=int(case.is_scanned),
        skip_gradients=False,
    )
    wrapped = pruner.wrap_optax(TX)
    state = wrapped.init(params)
    model = sparsity.compact(sparsity.trace(network, params, x), params, state.masks)

    def wrapped_step(params: Any, state: Any) -> Any:
        grads = jax.grad(functools.partial(loss, network))(params)
        updates, state = wrapped.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(model: Any, values: Any, state: Any) -> Any:
        grads = jax.grad(functools.partial(loss, model.apply))(values)
        updates, state = TX.update(grads, state, values)
        return optax.apply_updates(values, updates), state

    def move(model: Any, values: Any, state: Any) -> Any:
        return model.move(
            pruner, values, state, 1, None if case.algorithm is sparsity.SET else loss
        )

    kept = model, model.params, TX.init(model.params)
    programs = {
        "masked step that moves": (wrapped_step, (0, 1), (params, state)),
        "compact step": (step, (1, 2), kept),
        "compact move": (move, (0, 1, 2), kept),
    }
    label = f"{type(pruner).__name__}, {case.pattern}"
    return compare([case.name, label], programs, stack.size, rounds)


def compare(
    labels: list[str], programs: dict[str, tuple[Any, tuple[int, ...], Any]], size: int, rounds: int
) -> list[list[str]]:
    """Returns a row for each program, with times beside those of the compact step."""
    numbers, runs = {}, {}
    for name, (fn, donated, arguments) in programs.items():
        start = time.perf_counter()
        compiled = jax.jit(fn, donate_argnums=donated).lower(*arguments).compile()
        spent = time.perf_counter() - start
        memory = compiled.memory_analysis()
        nbytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else 0
        numbers[name] = nbytes / size, spent
        runs[name] = jax.jit(fn)
        jax.block_until_ready(runs[name](*arguments))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (_, _, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(runs[name](*arguments))
            seconds[name].append(time.perf_counter() - start)
    return [
        [*labels, name, f"{nbytes:.2f}", f"{ratio(seconds, name):.2f}", f"{spent:.1f}"]
        for name, (nbytes, spent) in numbers.items()
    ]


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Returns the median of the ratio to the compact step."""
    pairs = zip(seconds[name], seconds["compact step"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def report(rows: list[list[str]], layers: int, width: int) -> str:
    """Returns the section of RESULTS.md."""
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} {layers} layers of {width} x {width} at 90 %, {BATCH} rows, "
            "Adam. Memory: arguments and temporaries, donated. Times are not donated: medians of "
            "the ratio to a compact step that is measured in turn.",
            "",
            results.table(HEAD, rows),
        ]
    )


if __name__ == "__main__":
    main()
