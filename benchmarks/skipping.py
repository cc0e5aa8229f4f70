"""Ways to skip the inner optimizer in steps that update masks: time and memory of a training step.

With `skip_gradients` such a step trains nothing. Every eighth step here is skipped, by a flag that
the compiled program reads; steps of all ways are measured in turn, in one process, donated:

- never: no flag, every step trains.
- early: `update_unless`, which selects each new moment where it is defined.
- where: the update is computed, and the old or the new state selected in the end.
- cond: the update is one branch of `lax.cond`.

    python -m benchmarks.skipping [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from benchmarks import results
from benchmarks.train_step import Params, timed
from sparsity.training.skip import update_unless

HEADING = "## Skipped updates"
PERIOD = 8  # one step of so many is skipped
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
}

Update: TypeAlias = Callable[..., tuple[Any, Any]]
State: TypeAlias = tuple[Params, Any]


def never(skip: jax.Array, update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Updates in every step."""
    return update(grads, state, params)


def where(skip: jax.Array, update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Selects between the old and the new state after the update."""
    steps, new = update(grads, state, params)
    steps = jax.tree.map(lambda step: jnp.where(skip, jnp.zeros_like(step), step), steps)
    return steps, jax.tree.map(functools.partial(jnp.where, skip), state, new)


def cond(skip: jax.Array, update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Updates in a branch."""

    def keep(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, grads), state

    result: tuple[Any, Any] = jax.lax.cond(skip, keep, update, grads, state, params)
    return result


WAYS: dict[str, Update] = {"never": never, "early": update_unless, "where": where, "cond": cond}


def main() -> None:
    options = results.Parser(__doc__, "few steps of a small network").read()
    networks = {(128, 512, 128): 240, (1024, 4096, 1024): 120}
    if options.quick:
        networks = {(128, 512, 128): 24}
    rows = []
    for sizes, count in networks.items():
        for name in OPTIMIZERS:
            for row in measure(sizes, name, count):
                rows.append(["-".join(map(str, sizes)), name, *row])
                print(*rows[-1], sep="\t", flush=True)
    text = report(rows)
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


def measure(sizes: tuple[int, ...], optimizer: str, count: int) -> list[list[str]]:
    """Returns a row for each way: its name, ratios to `never`, MiB of temporaries."""
    batch = jax.random.normal(jax.random.key(1), (64, sizes[0]))
    steps, states, temporaries = {}, {}, {}
    for way, skipping in WAYS.items():
        tx = OPTIMIZERS[optimizer]()
        states[way], steps[way], temporaries[way] = compile_step(sizes, tx, skipping, batch)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for i in range(count):
        skip = i % PERIOD == 0
        for way in WAYS:
            step = functools.partial(steps[way], skip=jnp.bool_(skip))
            spent, states[way] = timed(step, states[way], batch)
            if i >= PERIOD:
                seconds.setdefault((way, skip), []).append(spent)
    rows = []
    for way in WAYS:
        ratios = [
            statistics.median(
                a / b for a, b in zip(seconds[way, skip], seconds["never", skip], strict=True)
            )
            for skip in (False, True)
        ]
        rows.append([way, *(f"{x:.2f}" for x in ratios), f"{temporaries[way] / 2**20:.1f}"])
    return rows


def compile_step(
    sizes: tuple[int, ...], tx: optax.GradientTransformation, skipping: Update, batch: jax.Array
) -> tuple[State, Callable[..., State], int]:
    """Returns an initial state, a compiled donated training step and its bytes of temporaries."""
    params = {
        f"w{i}": jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5
        for i, shape in enumerate(itertools.pairwise(sizes))
    }

    def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(batch @ params["w0"]) @ params["w1"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: jax.Array, skip: jax.Array) -> State:
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = skipping(skip, tx.update, grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = params, tx.init(params)
    compiled = step.lower(state, batch, skip=jnp.bool_(True)).compile()
    memory = compiled.memory_analysis()
    return state, compiled, memory.temp_size_in_bytes if memory else 0


def report(rows: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    head = ["network", "optimizer", "way", "step that trains", "skipped step", "temporaries, MiB"]
    return "\n".join(
        [
            HEADING,
            "",
            f"{results.measured_on()} An MLP, batch 64, donated; one step in {PERIOD} is skipped. "
            "Medians of the ratio to a step without a flag that is measured in turn. `early` is "
            "what `skip_gradients` does; `where` selects in the end, `cond` branches.",
            "",
            results.table(head, rows),
        ]
    )


if __name__ == "__main__":
    main()
