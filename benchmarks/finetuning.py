"""Steps that train a few entries beside a step of full training.

Adam, 12 scanned blocks of a transformer in bfloat16, 1 % of the entries by random masks, or a tenth
of the heads and of the hidden channels as a whole:

- memory: of the compiled step, donated, in bytes for each weight: arguments beyond the weights, and
  temporaries. A second column takes the temporaries at 2 and at 16 tokens, where activations are
  smaller than a matrix and share no memory with one, and extrapolates to none.
- operations: floating-point ones of the backward pass, over those of full training: of the compiled
  gradient less those of the compiled loss.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Fine-tuning of a few entries"
HEAD = [
    "step", "arguments beyond weights, B/weight", "temporaries, B/weight",
    "of these without activations", "backward operations, full", "time, full steps",
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
    layers, width, tokens, rounds = (2, 32, 32, 2) if options.quick else (12, 512, 128, 7)
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


class Step(NamedTuple):
    """A way to train.

    Attributes:
      arguments: values, the optimizer's state, inputs, and the model if there is one.
      gradient: returns the gradients, for these arguments.
      run: returns new values and the new state, for these arguments.
    """

    arguments: tuple[Any, ...]
    gradient: Callable[..., Any]
    run: Callable[..., Any]


def make_step(tx: optax.GradientTransformation, params: Any, *others: Any) -> Step:
    def gradient(params: Any, state: Any, x: jax.Array, *models: Any) -> Any:
        apply = models[0].apply if models else network
        return jax.grad(functools.partial(loss, apply))(params, x)

    def step(params: Any, state: Any, *others: Any) -> Any:
        updates, state = tx.update(gradient(params, state, *others), state, params)
        return optax.apply_updates(params, updates), state

    return Step((params, tx.init(params), *others), gradient, step)


def make_steps(layers: int, width: int, x: jax.Array) -> dict[str, Step]:
    """Returns the ways to train by name."""
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
    graph = sparsity.trace(network, params, x)
    entries = sparsity.RandomPruning(batch_axes=1, sparsity_distribution_fn=sparsity.Uniform(0.99))
    channels = sparsity.RandomPruning(
        scope=sparsity.Coupled(graph), sparsity_distribution_fn=sparsity.Uniform(0.9)
    )
    steps = {"full": make_step(TX, params, x)}
    masks = entries.instant_sparsify(params)[1]
    steps["train_only"] = make_step(sparsity.train_only(TX, masks), params, x)
    for name, pruner in {"entries": entries, "channels": channels}.items():
        masks = pruner.instant_sparsify(params)[1]
        model = sparsity.compact(graph, params, masks, outside="frozen")
        steps[f"compact, {name}"] = make_step(TX, model.params, x, model)
    return steps


def measure(layers: int, width: int, tokens: int, rounds: int) -> list[list[str]]:
    """Returns a row for each step."""
    x = jnp.ones((2, tokens // 2, width), jnp.bfloat16)
    steps = make_steps(layers, width, x)
    params = steps["full"].arguments[0]
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    forward = count_operations(functools.partial(loss, network), (params, x))
    columns, runs = {}, {}
    for name, step in steps.items():
        lengths = tokens // 2, 1, 8
        counts = {n: count_bytes(step, jnp.ones((2, n, width), x.dtype)) for n in {*lengths}}
        at_many, at_two, at_sixteen = (counts[n] for n in lengths)
        columns[name] = [
            at_many.argument_size_in_bytes / weights - 2,
            at_many.temp_size_in_bytes / weights,
            (8 * at_two.temp_size_in_bytes - at_sixteen.temp_size_in_bytes) / 7 / weights,
            count_operations(step.gradient, step.arguments) - forward,
        ]
        runs[name] = jax.jit(step.run)
        jax.block_until_ready(runs[name](*step.arguments))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(runs[name](*step.arguments))
            seconds[name].append(time.perf_counter() - start)
    backward = columns["full"][-1]
    for name, column in columns.items():
        column[-1:] = column[-1] / backward, ratio(seconds, name)
    return [[name, *(f"{x:.2f}" for x in column)] for name, column in columns.items()]


def count_bytes(step: Step, x: jax.Array) -> Any:
    """Returns the memory of a compiled step, whose values and state are donated, for inputs."""
    arguments = (*step.arguments[:2], x, *step.arguments[3:])
    return jax.jit(step.run, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()


def count_operations(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Returns the floating-point operations of a compiled function; each loop runs once."""
    count: float = jax.jit(fn).lower(*arguments).compile().cost_analysis()["flops"]
    return count


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
            f"the entries at random or 10 % of heads and channels, Adam, {tokens} tokens. "
            "Without activations: temporaries extrapolated from 2 and 16 tokens to none. "
            "Times: medians of the ratio to a step of full training that is measured in "
            "turn, not donated.",
            "",
            results.table(HEAD, rows),
        ]
    )


if __name__ == "__main__":
    main()
