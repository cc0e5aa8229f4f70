"""Time of a training step with sparse activations, against the same step without.

The CNN of two convolutions and two dense layers that the activation prunings are meant for: 90 % of
the first convolution's outputs are kept, 2 of every 4 of the second's. Batch 100, Adam, donated.
All variants are measured in turn in one process; the figures are medians.

    python -m benchmarks.activations [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import optax

import sparsity
from benchmarks import results
from benchmarks.train_step import timed

HEADING = "## Sparse activations"
LAYERS: dict[str, dict[str, Any]] = {
    "none": {},
    "unstructured": {"Conv_0": 0.9},
    "2:4": {"Conv_1": (2, 4)},
    "both": {"Conv_0": 0.9, "Conv_1": (2, 4)},
}


class CNN(nn.Module):
    """Images [N, 28, 28, 1] to logits [N, 10]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def make_step(images: jax.Array, layers: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """Returns a state and a training step on random labels."""
    labels = jax.random.randint(jax.random.key(1), images.shape[:1], 0, 10)
    tx, apply = optax.adam(1e-3), sparsity.sparsify_linen(CNN().apply, layers)

    def loss_fn(params: Any, images: jax.Array) -> jax.Array:
        logits = apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, images: jax.Array) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, images), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = CNN().init(jax.random.key(0), images)
    return (params, tx.init(params)), step


def measure(batch_size: int, rounds: int) -> list[list[str]]:
    """Returns a row for each variant: median ratio to the dense step, and milliseconds."""
    images = jax.random.normal(jax.random.key(2), (batch_size, 28, 28, 1))
    runs = {name: make_step(images, layers) for name, layers in LAYERS.items()}
    states = {name: state for name, (state, _) in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 3):
        for name, (_, step) in runs.items():
            time, states[name] = timed(step, states[name], images)
            if i >= 3:
                seconds[name].append(time)
    return [
        [
            name,
            f"{statistics.median(t / d for t, d in zip(times, seconds['none'], strict=True)):.2f}",
            f"{1000 * statistics.median(times):.1f}",
        ]
        for name, times in seconds.items()
    ]


def report(batch_size: int, rows: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    table = results.table(["sparse activations", "step against dense", "step, ms"], rows)
    about = (
        f"{results.measured_on()} A CNN of two convolutions (32, 64 features) and two dense layers "
        f"on 28x28 images, batch {batch_size}, Adam, donated; 90 % of the first convolution's "
        "outputs, 2 of 4 of the second's. Medians of steps measured in turn."
    )
    return f"{HEADING}\n\n{about}\n\n{table}"


def main() -> None:
    options = results.Parser(__doc__, "few steps of a small batch").read()
    batch_size = 10 if options.quick else 100
    text = report(batch_size, measure(batch_size, 5 if options.quick else 40))
    print(text)
    if options.write:
        results.write_section(text)


if __name__ == "__main__":
    main()
