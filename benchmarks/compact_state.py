"""State of the optimizer for kept weights only (`use_compact_state`): memory and time of an update.

One update of Adam with `apply_updates`, without forward and backward pass, on float32 matrices:

- state: bytes of the optimizer's state, masks included, for each weight.
- temporaries: bytes that the compiled update allocates beyond arguments and results.
- update: medians of the ratio to the wrapped update that is measured in turn, in one process, with
  donated params and state, and without donation.
- compilation: seconds, of the donated update.

    python -m benchmarks.compact_state [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Compact state"
WAYS = {
    "wrapped": {},
    "wrapped, packed": {"use_packed_masks": True},
    "compact": {"use_compact_state": True},
    "compact, packed": {"use_compact_state": True, "use_packed_masks": True},
}
HEAD = [
    "sparsity", "way", "state, B/weight", "temporaries, B/weight", "update, donated",
    "update, not donated", "compilation, s",
]  # fmt: skip

Params: TypeAlias = dict[str, jax.Array]


class Way(NamedTuple):
    """Compiled updates of one way, and their arguments."""

    donated: Callable[..., Any]
    copied: Callable[..., Any]
    state: Any
    temporaries: int
    seconds: float


def main() -> None:
    options = results.Parser(__doc__, "few updates of small matrices").read()
    shape, count = ((64, 128), 3) if options.quick else ((1024, 2048), 40)
    rows = []
    for target in (0.5, 0.8, 0.9, 0.95):
        for row in measure(shape, target, count):
            rows.append(row)
            print(*row, sep="\t", flush=True)
    text = report(rows)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def measure(shape: tuple[int, int], target: float, count: int) -> list[list[str]]:
    """Returns a row for each way, from `count` updates of six matrices."""
    params = {f"w{i}": jax.random.normal(jax.random.key(i), shape) for i in range(6)}
    grads = jax.tree.map(lambda x: 2 * x + 1, params)
    size = sum(x.size for x in params.values())
    ways = {name: compile_way(params, target, fields) for name, fields in WAYS.items()}
    nbytes = {name: sum(x.nbytes for x in jax.tree.leaves(way.state)) for name, way in ways.items()}
    seconds: dict[tuple[str, str], list[float]] = {}
    carries = {name: (jax.tree.map(jnp.copy, params), way.state) for name, way in ways.items()}
    for i in range(count):
        for name, way in ways.items():
            for kind in ("copied", "donated"):
                update = getattr(way, kind)
                start = time.perf_counter()
                carry = jax.block_until_ready(update(grads, *carries[name]))
                spent = time.perf_counter() - start
                if kind == "donated":
                    carries[name] = carry
                if i:
                    seconds.setdefault((name, kind), []).append(spent)
    rows = []
    for name, way in ways.items():
        ratios = [ratio(seconds, name, kind) for kind in ("donated", "copied")]
        numbers = (nbytes[name] / size, way.temporaries / size, *ratios)
        rows.append([f"{target:.0%}", name, *(f"{x:.2f}" for x in numbers), f"{way.seconds:.1f}"])
    return rows


def ratio(seconds: dict[tuple[str, str], list[float]], name: str, kind: str) -> float:
    """Returns the median of the ratio to the wrapped update."""
    pairs = zip(seconds[name, kind], seconds["wrapped", kind], strict=True)
    return statistics.median(a / b for a, b in pairs)


def compile_way(params: Params, target: float, fields: dict[str, bool]) -> Way:
    """Returns the compiled updates and the first state of a way."""
    updater = sparsity.StaticRandomSparse(
        sparsity_distribution_fn=sparsity.Uniform(target), **fields
    )
    tx = updater.wrap_optax(optax.adam(1e-3))
    state = tx.init(params)

    def update(grads: Params, params: Params, state: Any) -> tuple[Params, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = time.perf_counter()
    donated = jax.jit(update, donate_argnums=(1, 2)).lower(params, params, state).compile()
    spent = time.perf_counter() - start
    memory = donated.memory_analysis()
    copied = jax.jit(update).lower(params, params, state).compile()
    return Way(donated, copied, state, memory.temp_size_in_bytes if memory else 0, spent)


def report(rows: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} One update of Adam under `static_sparse` on six matrices of "
            "1024 x 2048, without forward and backward pass. Updates: medians of the ratio to the "
            "wrapped update that is measured in turn.",
            "",
            results.table(HEAD, rows),
        ]
    )


if __name__ == "__main__":
    main()
