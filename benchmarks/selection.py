"""Time of a mask selection beside sorting, lax.top_k, bisection and numpy.partition.

    python -m benchmarks.selection [--quick] [--gpu] [--write]

All methods run interleaved in one process. A time is a median, in units of jnp.sum of the same
array. --write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import results
from sparsity import selection

SIZES = [10**5, 10**6, 10**7]
SLOW = ("argsort", "lax.top_k")  # left out above 1e7, run less often
HEADING = "## Selection"
Row = list[str]


def data(n: int) -> Iterator[tuple[str, jax.Array]]:
    """Score arrays of n entries, by name."""
    normal = jnp.abs(jax.random.normal(jax.random.key(0), (n,)))
    yield "abs(normal)", normal
    yield "80 % zeros", jnp.where(jax.random.uniform(jax.random.key(1), (n,)) < 0.8, 0, normal)
    yield "heavy ties", jnp.round(normal * 2) / 2
    yield "bfloat16", normal.astype(jnp.bfloat16)


@jax.jit
def argsort_mask(x: jax.Array, k: jax.Array) -> jax.Array:
    order = jnp.argsort(-x)
    kept = (jnp.arange(x.size) < k).astype(jnp.uint8)
    return jnp.zeros(x.shape, jnp.uint8).at[order].set(kept)


@functools.partial(jax.jit, static_argnums=1)
def top_k_mask(x: jax.Array, k: int) -> jax.Array:
    return jnp.zeros(x.shape, jnp.uint8).at[lax.top_k(x, k)[1]].set(1)


@jax.jit
def bisection_mask(x: jax.Array, k: jax.Array) -> jax.Array:
    """32 halvings of the key space; ties are all kept."""
    keys = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    def halve(i: jax.Array, t: jax.Array) -> jax.Array:
        higher = t | (jnp.int32(1) << (30 - i))
        return jnp.where(jnp.sum(keys >= higher, dtype=jnp.int32) >= k, higher, t)

    return (keys >= lax.fori_loop(0, 31, halve, jnp.int32(0))).astype(jnp.uint8)


def medians(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, run in turn; a slow one runs three times."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for i in range(rounds):
        for name, function in functions.items():
            if i < 3 or not name.startswith(SLOW):
                if not name.startswith(SLOW):
                    jax.block_until_ready(function())  # wakes threads and caches after a rival
                start = time.perf_counter()
                jax.block_until_ready(function())
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def selection_row(name: str, x: jax.Array, rounds: int, rivals: bool) -> Row:
    n, k = x.size, x.size // 5
    start = time.process_time()
    compiled = jax.jit(selection.topk_mask).lower(x, jnp.int32(k)).compile()
    compile_seconds = time.process_time() - start
    total, host = jax.jit(jnp.sum), np.asarray(x)
    functions: dict[str, Callable[[], Any]] = {
        "sum": lambda: total(x),
        "mask": lambda: compiled(x, jnp.int32(k)),
        "outside of jit": lambda: selection.topk_mask(x, k),
    }
    if rivals:
        functions["bisection"] = lambda: bisection_mask(x, k)
        if host.dtype == np.float32:
            functions["numpy.partition"] = lambda: np.partition(host, n - k)
        if n <= 10_000_000:
            functions["argsort"] = lambda: argsort_mask(x, k)
            functions["lax.top_k"] = lambda: top_k_mask(x, k)
    seconds = medians(functions, rounds)
    relative = [
        f"{seconds[m] / seconds['sum']:.1f}" if m in seconds else "-"
        for m in ("mask", "outside of jit", "bisection", "numpy.partition", "lax.top_k", "argsort")
    ]
    bytes_each = compiled.memory_analysis().temp_size_in_bytes / n
    return [
        f"{n:.0e}", name, f"{seconds['sum'] * 1e3:.2f}", *relative,
        f"{bytes_each:.4f}", f"{compile_seconds:.1f}",
    ]  # fmt: skip


def gpt_shapes(layers: int) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a small GPT: 148 leaves, 10.7M weights for 12 layers."""
    block = [(256,)] * 5 + [(896,)] + [(256, 256)] * 4 + [(256, 896), (896, 256)]
    return [*block * layers, (256,), (256,), (512, 256), (8192, 256)]


def path_rows(layers: int, rounds: int) -> list[Row]:
    """A tree with one threshold, and the natural shape, against the same scores as a vector."""
    keys = iter(jax.random.split(jax.random.key(2), 14 * layers + 4))
    tree = [jnp.abs(jax.random.normal(next(keys), shape)) for shape in gpt_shapes(layers)]
    vector = jnp.concatenate([x.reshape(-1) for x in tree])
    matrix = vector[: vector.size // 4096 * 4096].reshape(-1, 4096)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    on_mesh = jax.device_put(matrix, NamedSharding(mesh, PartitionSpec("data")))
    k = vector.size // 5
    total, search = jax.jit(jnp.sum), jax.jit(selection.topk_mask)
    rows = []
    for name, scores, select in (
        ("vector", vector, selection.topk_mask),
        (f"tree of {len(tree)}", tree, selection.global_topk_mask),
        ("natural shape", on_mesh, selection.topk_mask),
    ):
        start = time.process_time()
        compiled = jax.jit(select).lower(scores, jnp.int32(k)).compile()
        compile_seconds = time.process_time() - start
        t = medians(
            {
                "sum": lambda: total(vector),
                "vector": lambda: search(vector, k),
                "mask": lambda scores=scores, compiled=compiled: compiled(scores, jnp.int32(k)),
            },
            rounds,
        )
        temporaries = compiled.memory_analysis().temp_size_in_bytes / vector.size
        rows.append([f"{name}, {vector.size / 1e6:.1f}M", f"{t['mask'] / t['sum']:.1f}",
                     f"{t['mask'] / t['vector']:.2f}", f"{temporaries:.4f}",
                     f"{compile_seconds:.1f}"])  # fmt: skip
    return rows


def double_argsort_mask(x: jax.Array, n: int, m: int) -> jax.Array:
    order = jnp.argsort(-x.reshape(-1, m), axis=1)
    return (jnp.argsort(order, axis=1) < n).astype(jnp.uint8).reshape(x.shape)


def group_rows(side: int, rounds: int) -> list[Row]:
    """N:M masks of (side, side) against ranks by double argsort; hashed scores."""
    x = jax.random.normal(jax.random.key(0), (side, side))
    total = jax.jit(jnp.sum)
    rows = []
    for n, m in ((2, 4), (4, 8)):
        sort = jax.jit(functools.partial(double_argsort_mask, n=n, m=m))
        t = medians(
            {
                "sum": lambda: total(x),
                "mask": lambda n=n, m=m: selection.nm_mask(x, n, m),
                "argsort": lambda sort=sort: sort(x),
            },
            rounds,
        )
        rows.append([f"{n}:{m} of ({side}, {side})", f"{t['mask'] / t['sum']:.1f}",
                     f"{t['argsort'] / t['mask']:.0f}"])  # fmt: skip
    draw = jax.jit(lambda step: selection.hash_scores((side, side), 0, step))
    t = medians(
        {
            "sum": lambda: total(x),
            "mask": lambda: draw(jnp.uint32(1)),
            "select": lambda: selection.topk_mask(x, x.size // 5),
        },
        rounds,
    )
    rows.append([f"hash_scores of ({side}, {side})", f"{t['mask'] / t['sum']:.1f}",
                 f"{t['select'] / t['mask']:.1f} (selection / hash)"])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--gpu", action="store_true", help="1e8 and 1e9 on a GPU, no rivals")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    if args.gpu and jax.default_backend() == "cpu":
        parser.error("--gpu needs a GPU, and jax sees none.")
    sizes = SIZES[:2] if args.quick else [10**8, 10**9] if args.gpu else SIZES
    rounds = 5 if args.quick else 7
    head = ["n", "scores", "sum, ms", "topk_mask", "outside of jit", "bisection",
            "numpy.partition", "lax.top_k", "argsort", "temp bytes each",
            "compile, CPU s"]  # fmt: skip
    rows = [selection_row(*d, rounds, not args.gpu) for n in sizes for d in data(n)]
    groups = group_rows(1024 if args.quick else 4096, rounds)
    paths = path_rows(1 if args.quick else 12, rounds)
    report = "\n".join(
        [
            HEADING,
            f"\n{results.measured_on()} Keep 20 %; times in units of `jnp.sum`.\n",
            results.table(head, rows),
            "",
            results.table(
                ["scores", "x jnp.sum", "x the vector", "temp bytes each", "compile, CPU s"], paths
            ),
            "",
            results.table(["masks", "x jnp.sum", "x faster than double argsort"], groups),
        ]
    )
    print(report)
    if args.write:
        results.write_section(report)


if __name__ == "__main__":
    main()
