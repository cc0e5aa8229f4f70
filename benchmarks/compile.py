"""What the first update step costs: CPU-seconds to trace, lower and compile, and temporaries.

`tx.update` of adam over the kernels of a ResNet-50 (54, 25.5 M weights) and the matrices of a
transformer (224 of 6 shapes, 92.8 M weights), alone and with each algorithm; `coupled` is magnitude
pruning of whole channels. Beside them magnitude pruning whose masks are found by sorting. Every
program is compiled in a process of its own.

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
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

import sparsity
from benchmarks import results

HEADING = "## Compiling an update"
ALGORITHMS = ("adam", "magnitude", "global_magnitude", "coupled", "set", "rigl", "argsort")
BLOCKS = (3, 4, 6, 3)  # of a ResNet-50
Params: TypeAlias = Mapping[str, jax.Array]


def main() -> None:
    parser = results.Parser(__doc__, "a tree of three kernels")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.read()
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
    layers: list[tuple[int, ...]] = [(7, 7, 3, 64)]
    entering = 64
    for width, blocks in zip((64, 128, 256, 512), BLOCKS, strict=True):
        for block in range(blocks):
            layers += [(1, 1, entering, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                layers.append((1, 1, entering, 4 * width))
            entering = 4 * width
    return [*layers, (2048, 1000)]


def few(params: Params, x: jax.Array) -> jax.Array:
    """The model of three kernels."""
    return jnp.tanh(x @ params["0"])[:, :30] @ params["1"] + (x[:, :1] @ params["2"][:1])[:, :20]


def resnet50(params: Params, x: jax.Array) -> jax.Array:
    """Its kernels, without norms and strides."""

    def conv(x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, next(kernels), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    kernels = iter([params[f"{i}"] for i in range(len(params))])
    x = conv(x)
    for blocks in BLOCKS:
        for block in range(blocks):
            y = conv(jax.nn.relu(conv(jax.nn.relu(conv(x)))))
            x = jax.nn.relu((conv(x) if block == 0 else x) + y)
    return x.mean((1, 2)) @ next(kernels)


def transformer(params: Params, x: jax.Array) -> jax.Array:
    """Its matrices, without norms: grouped queries and gated MLPs."""
    for layer in range(0, len(params), 7):
        q, k, v, out, gate, up, down = (params[f"{layer + i}"] for i in range(7))
        queries = jnp.einsum("te,ehd->thd", x, q).reshape(len(x), 4, 2, 64)
        scores = jnp.einsum("tgnd,sgd->gnts", queries, jnp.einsum("te,egd->tgd", x, k))
        values = (x @ v).reshape(len(x), 4, 64)
        heads = jnp.einsum("gnts,sgd->tgnd", jax.nn.softmax(scores), values)
        x = x + jnp.einsum("thd,hde->te", heads.reshape(len(x), 8, 64), out)
        x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
    return x


# Of each tree the model and the shape of its inputs.
MODELS: dict[str, tuple[Callable[[Params, jax.Array], jax.Array], tuple[int, ...]]] = {
    "few": (few, (2, 64)),
    "resnet50": (resnet50, (1, 8, 8, 3)),
    "transformer": (transformer, (4, 512)),
}


def make(name: str, tree: str, params: Params) -> optax.GradientTransformation:
    """Adam, with an algorithm that updates masks or alone."""
    inner = optax.adam(1e-3)
    if name == "adam":
        return inner
    options = {"algorithm": name, "sparsity": 0.9}
    options |= {"update_freq": 10, "update_start_step": 0, "update_end_step": 1000}
    if name == "argsort":
        options |= {"algorithm": "magnitude", "topk_fn": by_sorting}
    if name == "coupled":
        model, shape = MODELS[tree]
        graph = sparsity.trace(model, params, jax.ShapeDtypeStruct(shape, jnp.float32))
        options |= {"algorithm": "magnitude", "scope": sparsity.Coupled(graph)}
    return sparsity.create_updater_from_config(options).wrap_optax(inner)


def by_sorting(scores: jax.Array, share: jax.Array) -> jax.Array:
    """The mask of the highest scores, by their ranks."""
    flat = scores.reshape(-1)
    ranks = jnp.argsort(jnp.argsort(-flat))
    return (ranks < sparsity.selection.num_kept(flat.size, share)).reshape(scores.shape)


def measure(tree: str, name: str) -> list[float]:
    """CPU-seconds to trace, to lower, to compile; bytes of temporaries for each weight.

    The bytes are those of `tx.update` alone, then of a step with params and state donated.
    """
    params = {f"{i}": jax.ShapeDtypeStruct(x, jnp.float32) for i, x in enumerate(shapes(tree))}
    tx = make(name, tree, params)
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

    def step(params: Params, state: optax.OptState, grads: Params) -> tuple[optax.Params, ...]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donated = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    programs = compiled, donated
    return [*spent, *(x.memory_analysis().temp_size_in_bytes / weights for x in programs)]


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
        "donated",
    ]
    cells = []
    for tree, name, *figures in rows:
        trace, lower, compiled, temporaries, donated = (float(str(x)) for x in figures)
        spent = [f"{x:.1f}" for x in (trace, lower, compiled, trace + lower + compiled)]
        cells.append([str(tree), str(name), *spent, f"{temporaries:.3f}", f"{donated:.3f}"])
    return (
        f"{HEADING}\n\n{results.measured_on()} `tx.update` of adam, one process each: a ResNet-50 "
        "(54 kernels, 25.5 M weights) and a transformer (224 matrices of 6 shapes, 92.8 M "
        "weights); `donated` is a step with params and state "
        "donated; `coupled` removes whole channels, `argsort` is magnitude pruning by two sorts a "
        "leaf. CPU-seconds on a shared machine differ by up to 40 % between runs.\n\n"
        f"{results.table(head, cells)}"
    )


if __name__ == "__main__":
    main()
