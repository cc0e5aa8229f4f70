"""Steps that train a few entries beside a step of full training.

Adam, 12 scanned blocks of a transformer in bfloat16, 1 % of the entries by random masks:

- memory: of the compiled step, donated, in bytes for each weight: arguments beyond the weights, and
  temporaries. A second column takes the temporaries at few tokens and at four times as many, and
  extrapolates to none, which leaves what activations do not cost.
- time: medians of the ratio to a step of full training that is measured in turn, in one process.

    python -m benchmarks.finetuning [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
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

HEADING = "## Fine-tuning of a few entries"
HEAD = [
    "step", "arguments beyond weights, B/weight", "temporaries, B/weight",
    "of these without activations", "time, full steps",
]  # fmt: skip
TX = optax.adam(1e-3)
HEADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds of small layers")
    parser.add_argument("--write", action="store_true", help="renew the section of RESULTS.md")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--write needs the full measurement, without --quick.")
    layers, width, tokens, rounds = (2, 32, 16, 2) if options.quick else (12, 512, 32, 7)
    rows = measure(layers, width, tokens, rounds)
    text = report(rows, layers, width, tokens)
    print(text)
    if options.write:
        results.write_section(text)


def network(params: Any, x: jax.Array) -> jax.Array:
    """Returns the output of transformer blocks for inputs [rows, tokens, width]."""

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        heads = (norm(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=2), is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["mixed"]
        return x + jax.nn.relu(norm(x) @ layer["up"]) @ layer["down"], None

    return jax.lax.scan(block, x, params)[0]


def loss(apply: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(apply(params, x).astype(jnp.float32) - 1))


def make_steps(layers: int, width: int, x: jax.Array) -> dict[str, tuple[Any, Any]]:
    """Returns {name: (step, its arguments)}; values and state are the first two arguments."""
    shapes = {
        "qkv": (width, 3 * width),
        "mixed": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = {
        name: jax.random.normal(jax.random.key(0), (layers, *shape), jnp.bfloat16) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    pruner = sparsity.RandomPruning(batch_axes=1, sparsity_distribution_fn=sparsity.Uniform(0.99))
    masks = pruner.instant_sparsify(params)[1]
    model = sparsity.compact(sparsity.trace(network, params, x), params, masks, outside="frozen")

    def make(tx: Any) -> Any:
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            grads = jax.grad(functools.partial(loss, network))(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step

    def frozen_step(values: Any, state: Any, x: jax.Array, model: Any) -> Any:
        grads = jax.grad(functools.partial(loss, model.apply))(values, x)
        updates, state = TX.update(grads, state, values)
        return optax.apply_updates(values, updates), state

    only = sparsity.train_only(TX, masks)
    return {
        "full": (make(TX), (params, TX.init(params), x)),
        "train_only": (make(only), (params, only.init(params), x)),
        "compact, frozen": (frozen_step, (model.params, TX.init(model.params), x, model)),
    }


def measure(layers: int, width: int, tokens: int, rounds: int) -> list[list[str]]:
    """Returns a row for each step."""
    few, many = (jnp.ones((2, count // 2, width), jnp.bfloat16) for count in (tokens, 4 * tokens))
    small, large = (make_steps(layers, width, x) for x in (few, many))
    weights = sum(leaf.size for leaf in jax.tree.leaves(large["full"][1][0]))
    memory, runs = {}, {}
    for name, (step, arguments) in large.items():
        compiled = compile_step(step, arguments)
        at_many, at_few = (
            program.memory_analysis().temp_size_in_bytes / weights
            for program in (compiled, compile_step(*small[name]))
        )
        nbytes = compiled.memory_analysis().argument_size_in_bytes / weights
        memory[name] = nbytes - 2, at_many, at_few - (at_many - at_few) / 3
        runs[name] = jax.jit(step)
        jax.block_until_ready(runs[name](*arguments))
    seconds: dict[str, list[float]] = {name: [] for name in large}
    for _ in range(rounds):
        for name, (_, arguments) in large.items():
            start = time.perf_counter()
            jax.block_until_ready(runs[name](*arguments))
            seconds[name].append(time.perf_counter() - start)
    return [
        [name, *(f"{x:.2f}" for x in memory[name]), f"{ratio(seconds, name):.2f}"] for name in large
    ]


def compile_step(step: Any, arguments: Any) -> Any:
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Returns the median of the ratio to a step of full training."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds["full"], strict=True))


def report(rows: list[list[str]], layers: int, width: int, tokens: int) -> str:
    """Returns the section of RESULTS.md."""
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} {layers} scanned blocks of width {width} in bfloat16, 1 % of "
            f"the entries at random, Adam, {4 * tokens} tokens. Without activations: temporaries "
            f"extrapolated from {tokens} and {4 * tokens} tokens to none. Times: medians of the "
            "ratio to a step of full training that is measured in turn, not donated.",
            "",
            results.table(HEAD, rows),
        ]
    )


if __name__ == "__main__":
    main()
