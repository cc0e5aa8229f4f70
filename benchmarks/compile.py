"""What the first update step costs: CPU-seconds to trace, lower and compile, and temporaries.

`tx.update` of adam over the kernels of a ResNet-50 (54, 25.5 M weights) and the matrices of a
transformer (224 of 6 shapes, 92.8 M weights), alone and with each algorithm; beside them magnitude
pruning whose masks are found by sorting. Every program is compiled in a process of its own.

    python -m benchmarks.compile [--quick] [--algorithms NAME ...] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Compiling an update"
ALGORITHMS = ("adam", "magnitude", "global_magnitude", "set", "rigl", "argsort")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tree of three kernels")
    parser.add_argument("--write", action="store_true", help="renew the section of RESULTS.md")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--write needs the full measurement, without --quick.")
    if options.one:
        print(json.dumps(measure(options.one, *options.algorithms)))
        return
    rows = []
    for tree in ["few"] if options.quick else ["resnet50", "transformer"]:
        for name in options.algorithms:
            command = [sys.executable, "-m", "benchmarks.compile", "--one", tree]
            done = subprocess.run(
                [*command, "--algorithms", name], check=True, capture_output=True, text=True
            )
            rows.append([tree, name, *json.loads(done.stdout.splitlines()[-1])])
            print(*rows[-1], sep="\t", flush=True)
    text = report(rows)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def shapes(tree: str) -> list[tuple[int, ...]]:
    """The shapes of a tree's leaves."""
    if tree == "few":
        return [(64, 300), (30, 20), (128, 128)]
    if tree == "transformer":
        heads = [(512, 8, 64), (512, 4, 64), (512, 256), (8, 64, 512)]
        return [*heads, (512, 1376), (512, 1376), (1376, 512)] * 32
    found: list[tuple[int, ...]] = [(7, 7, 3, 64)]
    entering = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            found += [(1, 1, entering, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                found.append((1, 1, entering, 4 * width))
            entering = 4 * width
    return [*found, (2048, 1000)]


def make(name: str) -> optax.GradientTransformation:
    """Adam, with an algorithm that updates masks or alone."""
    inner = optax.adam(1e-3)
    if name == "adam":
        return inner
    options = {"algorithm": "magnitude" if name == "argsort" else name, "sparsity": 0.9}
    options |= {"update_freq": 10, "update_start_step": 0, "update_end_step": 1000}
    if name == "argsort":
        options["topk_fn"] = by_sorting
    return sparsity.create_updater_from_config(options).wrap_optax(inner)


def by_sorting(scores: jax.Array, share: jax.Array) -> jax.Array:
    """The mask of the highest scores, by their ranks."""
    flat = scores.reshape(-1)
    ranks = jnp.argsort(jnp.argsort(-flat))
    return (ranks < sparsity.selection.num_kept(flat.size, share)).reshape(scores.shape)


def measure(tree: str, name: str) -> list[float]:
    """CPU-seconds to trace, to lower, to compile; bytes of temporaries for each weight."""
    params = {f"{i}": jax.ShapeDtypeStruct(x, jnp.float32) for i, x in enumerate(shapes(tree))}
    tx = make(name)
    state = jax.eval_shape(tx.init, params)
    jax.jit(jnp.sin).lower(1.0).compile()  # what starts with the first program
    times = [cpu_seconds()]
    traced = jax.jit(tx.update).trace(params, state, params)
    times.append(cpu_seconds())
    lowered = traced.lower()
    times.append(cpu_seconds())
    compiled = lowered.compile()
    times.append(cpu_seconds())
    weights = sum(math.prod(x) for x in shapes(tree))
    spent = [end - start for start, end in itertools.pairwise(times)]
    return [*spent, compiled.memory_analysis().temp_size_in_bytes / weights]


def cpu_seconds() -> float:
    """What all threads of this process have used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def report(rows: list[list[object]]) -> str:
    """The section of RESULTS.md."""
    head = [
        "tree",
        "algorithm",
        "trace, CPU s",
        "lower",
        "compile",
        "all",
        "temporaries, B a weight",
    ]
    cells = []
    for tree, name, *figures in rows:
        trace, lower, compiled, temporaries = (float(str(x)) for x in figures)
        spent = [f"{x:.1f}" for x in (trace, lower, compiled, trace + lower + compiled)]
        cells.append([str(tree), str(name), *spent, f"{temporaries:.3f}"])
    return (
        f"{HEADING}\n\n{results.measured_on()} `tx.update` of adam, one process each: a ResNet-50 "
        "(54 kernels, 25.5 M weights) and a transformer (224 matrices of 6 shapes, 92.8 M "
        "weights); `argsort` is magnitude pruning by two sorts a leaf. CPU-seconds on a shared "
        "machine differ by up to 40 % between runs. Traded: all leaves copy the row in which "
        "their ties end, which costs up to 0.02 bytes a weight and saves a loop with a branch a "
        "leaf; SET and RigL store the masks between their two searches.\n\n"
        f"{results.table(head, cells)}"
    )


if __name__ == "__main__":
    main()
