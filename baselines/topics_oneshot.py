"""Prunes trained character transformers in one shot, by several methods; writes ONESHOT.md.

    python -m baselines.topics_oneshot [--report]

The dense networks are those of `topics_transformer`. A result is stored as soon as it is there; the
same command goes on where it was stopped, and makes anew what another code has made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

import sparsity
from baselines import report, store, topics_transformer as task, training

SEEDS = 5
BATCHES, BATCH = 32, 16  # of calibration, windows of the text
FINE_TUNING_RATE = task.LEARNING_RATE / 10
KINDS = {
    "50 %": (0.5, sparsity.Unstructured()),
    "70 %": (0.7, sparsity.Unstructured()),
    "2:4": (0.5, sparsity.NByM(2, 4, axis=0)),
}
METHODS = {
    "magnitude": (sparsity.MagnitudePruning, None),
    "Wanda": (sparsity.WandaPruning, None),
    "RIA": (sparsity.RIAPruning, None),
    "SparseGPT": (sparsity.SparseGPTPruning, None),
    "Wanda, least squares": (sparsity.WandaPruning, sparsity.LeastSquares()),
    "Wanda, ADMM": (sparsity.WandaPruning, sparsity.ADMM()),
    "ADMM, a mask of its own": (sparsity.WandaPruning, sparsity.ADMM(gradual=15)),
}
FINE_TUNED = "Wanda, fine-tuned"
RESULTS = store.RESULTS / "topics_oneshot.json"
PAGE = store.FOLDER / "ONESHOT.md"

Bits = dict[str, list[float]]  # by "method, kind": bits per character of each seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="write the page, train nothing")
    found = load()
    if not parser.parse_args().report:
        networks = jax.jit(jax.vmap(train))(jnp.arange(SEEDS))
        for seed in range(SEEDS):
            measure(seed, jax.tree.map(lambda x, seed=seed: x[seed], networks), found)
    PAGE.write_text(page(found), encoding="utf-8")
    print(table(found))


# Networks.


def train(seed: jax.Array) -> chex.ArrayTree:
    """The dense network of a seed, as the other baselines train it."""
    key, _ = jax.random.split(jax.random.key(seed))
    init_key, key = jax.random.split(key)
    rate = training.warmup_cosine(task.LEARNING_RATE, task.STEPS)
    updater = sparsity.NoPruning()
    return training.fit(key, updater, task.init(init_key), optimizer(rate), loss, task.STEPS)


def optimizer(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    adamw = optax.adamw(rate, weight_decay=task.WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(task.MAX_NORM), adamw)


def loss(params: chex.ArrayTree, key: jax.Array) -> jax.Array:
    """Nats per character of a batch that the key draws."""
    return cross_entropy(params, windows(key, task.BATCH))


def cross_entropy(params: chex.ArrayTree, text: jax.Array) -> jax.Array:
    return training.cross_entropy(task.model(params, text[:, :-1]), text[:, 1:])


def windows(key: jax.Array, count: int) -> jax.Array:
    """int32[count, LENGTH + 1] of the text to train on."""
    text = jnp.asarray(task.data()[0])
    starts = jax.random.randint(key, (count,), 0, len(text) - task.LENGTH)
    return text[starts[:, None] + jnp.arange(task.LENGTH + 1)]


@jax.jit
def bits(params: chex.ArrayTree) -> jax.Array:
    """Bits per character of the text to test on."""
    text = jnp.asarray(task.data()[1])
    starts = jnp.linspace(0, len(text) - task.LENGTH - 1, task.TEST_BATCH).astype(jnp.int32)
    return cross_entropy(params, text[starts[:, None] + jnp.arange(task.LENGTH + 1)]) / jnp.log(2.0)


# Pruning.


def measure(seed: int, params: chex.ArrayTree, found: Bits) -> None:
    """Prunes the network of a seed by all methods that have no result for it yet."""
    key = jax.random.key(1000 + seed)
    text = windows(key, BATCHES * BATCH)[:, :-1]
    batches = list(text.reshape(BATCHES, BATCH, -1))

    def keep(name: str, made: Callable[[], chex.ArrayTree]) -> None:
        if len(found.get(name, ())) == seed:
            found.setdefault(name, []).append(round(float(bits(made())), 5))
            save(found)
            print(f"seed {seed}, {name}: {found[name][-1]:.4f}", flush=True)

    def prune(method: str, kind: str) -> chex.ArrayTree:
        cls, refit = METHODS[method]
        return sparsity.oneshot(pruner(cls, kind), task.model, params, batches, refit)[0]

    def fine_tune(kind: str) -> chex.ArrayTree:
        updater = pruner(sparsity.WandaPruning, kind)
        pruned, masks, _ = sparsity.oneshot(updater, task.model, params, batches)
        return train_on(updater, pruned, masks, key, equal_steps(params, batches))

    keep("dense", lambda: params)
    for kind in KINDS:
        for method in METHODS:
            keep(f"{method}, {kind}", lambda method=method, kind=kind: prune(method, kind))
        keep(f"{FINE_TUNED}, {kind}", lambda kind=kind: fine_tune(kind))


def pruner(cls: Any, kind: str) -> sparsity.BaseUpdater:
    """Prunes the matrices of the layers; embeddings and logits stay dense."""
    target, pattern = KINDS[kind]
    uniform = sparsity.Uniform(target, filter_fn=is_pruned)
    return cls(sparsity_distribution_fn=uniform, sparsity_type=pattern)


def is_pruned(path: Sequence[str], param: jax.Array) -> bool:
    return path[0] == "layers" and path[-1] == "kernel"


def equal_steps(params: chex.ArrayTree, batches: Sequence[jax.Array]) -> int:
    """Steps of training that cost the multiply-adds of the batches' forward passes and Grams."""
    graph = sparsity.trace(task.model, params, batches[0])
    rows = batches[0].size
    grams = sum(
        rows * leaf.shape[0] ** 2 for leaf in graph.parameters if is_pruned(leaf.path, leaf)
    )
    step = 3 * graph.macs() * task.BATCH // len(batches[0])  # the gradient costs two passes more
    return round(len(batches) * (graph.macs() + grams) / step)


def train_on(
    updater: sparsity.BaseUpdater,
    params: chex.ArrayTree,
    masks: chex.ArrayTree,
    key: jax.Array,
    steps: int,
) -> chex.ArrayTree:
    tx = updater.wrap_optax(optimizer(FINE_TUNING_RATE), masks=masks)

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, key), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0][0])
    return run((params, tx.init(params)), jax.random.split(key, steps))


# Results.


def fingerprint() -> str:
    """Of the code that trains and prunes."""
    names = ("training.py", "topics_transformer.py", "topics_oneshot.py")
    code = b"".join((store.FOLDER / name).read_bytes() for name in names)
    return hashlib.sha256(code).hexdigest()[:16]


def load() -> Bits:
    """What the present code has made."""
    if not RESULTS.exists():
        return {}
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    return stored["bits"] if stored["fingerprint"] == fingerprint() else {}


def save(found: Bits) -> None:
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps({"fingerprint": fingerprint(), "bits": found}, indent=1) + "\n")
    os.replace(new, RESULTS)


def page(found: Bits) -> str:
    return f"""# Pruning in one shot

`python -m baselines.topics_oneshot` made these results. The character transformer of
[RESULTS.md](RESULTS.md) is trained densely, from {SEEDS} seeds; then the matrices of its layers are
pruned with {BATCHES * BATCH} windows of {task.LENGTH} characters. Test bits per character, mean and
standard deviation over seeds; lower is better. Magnitude, Wanda and RIA choose which weights stay,
SparseGPT corrects those while it prunes, least squares and ADMM refit them. The last row trains
Wanda's network on, for as many steps as all statistics cost in multiply-adds.

{table(found)}
"""


def table(found: Bits) -> str:
    """A Markdown table of the results."""
    rows = [["dense", *([report.cell({"metric": found["dense"]})] * len(KINDS))]]
    for method in (*METHODS, FINE_TUNED):
        cells = [report.cell({"metric": found[f"{method}, {kind}"]}) for kind in KINDS]
        rows.append([method, *cells])
    return report.table(["method", *KINDS], rows)


if __name__ == "__main__":
    main()
