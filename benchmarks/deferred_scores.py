"""Memory of an update step whose scores are computed in the search, against stored scores.

    python -m benchmarks.deferred_scores [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsity
from benchmarks import results

HEADING = "## Deferred scores"
HOOKS = "calculate_scores", "get_drop_scores", "get_grow_scores"
NAMES = "magnitude", "saliency", "random", "rigl", "set", "lamp"


def main() -> None:
    options = results.Parser(__doc__, "small matrices").read()
    shape = (256, 256) if options.quick else (1024, 1024)
    rows = [[name, *measure(name, shape)] for name in NAMES]
    text = report(shape, rows)
    print(text)
    if options.write:
        results.write_section(text)


def store_scores(kind: type[sparsity.BaseUpdater]) -> type[sparsity.BaseUpdater]:
    """Returns a subclass whose hooks for scores return arrays, as hooks without marks do."""

    def make_hook(name: str) -> Callable[..., Any]:
        hook = getattr(kind, name)
        return lambda self, *args, **kwargs: hook(self, *args, **kwargs)  # names no `draw`

    called = [name for name in HOOKS if hasattr(kind, name) and name not in kind.unused_hooks]
    return type("Stored", (kind,), {name: make_hook(name) for name in called})


def measure(name: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the temporaries of an update step in bytes a weight, deferred and stored."""
    kind = sparsity.ALGORITHM_REGISTRY[name]
    return [f"{count_bytes(x, shape):.3f}" for x in (kind, store_scores(kind))]


def count_bytes(kind: type[sparsity.BaseUpdater], shape: tuple[int, ...]) -> float:
    """Returns the temporaries of a donated step of Adam on eight matrices, in bytes a weight."""
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(8)}
    updater = kind(
        sparsity_distribution_fn=sparsity.Uniform(0.9), scheduler=sparsity.PeriodicSchedule(10)
    )
    tx = updater.wrap_optax(optax.adam(1e-3))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = step.lower(params, jax.eval_shape(tx.init, params), params).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (8 * math.prod(shape))


def report(shape: tuple[int, ...], rows: Sequence[Sequence[str]]) -> str:
    """Returns the section of RESULTS.md."""
    size = " x ".join(map(str, shape))
    return (
        f"{HEADING}\n\n{results.measured_on()} Temporaries of an update step of Adam at 90 % on "
        f"eight matrices of {size}, float32, compiled with params and state donated. `stored` is a "
        "subclass whose hooks for scores call those of the base class, without the mark "
        "`elementwise` and the argument `draw`.\n\n"
        f"{results.table(['algorithm', 'deferred, B a weight', 'stored'], rows)}"
    )


if __name__ == "__main__":
    main()
