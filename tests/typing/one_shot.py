"""Prunes in one shot."""

import jax
import jax.numpy as jnp

import sparsity

Params = dict[str, jax.Array]


def model(params: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


params: Params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
batches = [jnp.ones((16, 4))]
pruner = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
pruned, masks, report = sparsity.oneshot(
    pruner, model, params, batches, refit=sparsity.ADMM(iterations=2)
)
kernel: jax.Array = pruned["up"]
mask: jax.Array = masks["up"]
error: float = report[("up",)].error


needed: sparsity.calibration.DryRun = sparsity.oneshot(
    pruner, model, params, batches, None, True, None, held=(), progress=True, dry_run=True
)
nbytes: int = needed.resident


def count(dry_run: bool) -> int:
    """Returns the bytes of a run, or the number of its layers."""
    result = sparsity.oneshot(pruner, model, params, batches, dry_run=dry_run)
    return result.resident if isinstance(result, sparsity.calibration.DryRun) else len(result[2])


class Untouched:
    """A refit of one's own, whose arguments have names of its own."""

    def __call__(
        self, w: jax.Array, new: jax.Array, m: jax.Array, seen: sparsity.Statistic, choose: object
    ) -> tuple[jax.Array, jax.Array]:
        return new, m


sparsity.oneshot(pruner, model, params, batches, Untouched())
statistics = sparsity.calibrate(model, params, batches, kind="gram")
gram = statistics[("up",)].gram
