"""What all tasks share: updaters from one recipe, a compiled run over several seeds, a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity

MOVERS = ("set", "rigl", "srigl", "global_rigl")
FROM_THE_START = (*MOVERS, "static_sparse", "top_kast", "admm")
GLOBAL = ("global_magnitude", "global_saliency", "lamp", "snip", "global_rigl")
RAMP = (0.2, 0.75)  # of the steps: where pruners begin to prune, and where all masks are final
MASK_UPDATES = 50  # of pruners along the ramp, of sparse trainers until its end
PHASES = 10  # of AC/DC along the ramp, the first one sparse
DROP_FRACTION = 0.3  # at the start, along a cosine to zero
BATCHES = 10  # that score initial weights
ROUNDS = 5  # of pruning, to find a lottery ticket

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train on.

    Attributes:
      name: of its files.
      title: in one line.
      metric: what is measured, with its unit.
      higher_is_better: whether more of it is better.
      sparsities: those to measure.
      seeds: how many runs side by side.
      settings: all numbers that decide the result; a result belongs to its settings.
      train: from a random key and an updater to the metric of the trained network and its sparsity.
      has_loss: whether `train` calls `fit`, which can find masks for the initial weights.
    """

    name: str
    title: str
    metric: str
    higher_is_better: bool
    sparsities: tuple[float, ...]
    seeds: int
    settings: dict[str, Any]
    train: Callable[[jax.Array, sparsity.BaseUpdater], Metrics]
    has_loss: bool = True


@dataclasses.dataclass(kw_only=True)
class GivenMasks(sparsity.StaticRandomSparse):
    """Trains within masks that are found for the initial weights.

    Attributes:
      masks_by: 'grasp' or 'synflow', as in `sparsity.prune_at_init`, or 'lottery_ticket'.
      target: fraction of the weights to remove.
    """

    masks_by: str
    target: float


def make_updater(
    algorithm: str,
    target: float,
    steps: int,
    key: int | jax.Array,
    masks_by: str | None = None,
    **options: Any,
) -> sparsity.BaseUpdater:
    """Returns an updater by the recipe of all tasks.

    Layers get their sparsities from ERK, but for global pruning, which shares them out itself.
    Pruners follow a cubic ramp; sparse trainers move their masks, static ones stay, and
    straight-through methods are sparse from the first step. SNIP prunes in the first step, ADMM
    where ramps end, AC/DC has its phases along the ramp.

    Args:
      algorithm: its name in the registry.
      target: fraction of the weights to remove.
      steps: updates of the optimizer in a run.
      key: random key, may be traced.
      masks_by: how static masks are found, if they are not random.
      **options: fields of the updater beside those of the recipe.
    """
    if masks_by:
        return GivenMasks(masks_by=masks_by, target=target)
    config: dict[str, Any] = {"algorithm": algorithm, "rng_seed": key, **options}
    if algorithm == "no_prune":
        return sparsity.create_updater_from_config(config)
    start, end = (int(steps * share) for share in RAMP)
    config["sparsity"] = target
    if algorithm not in GLOBAL:
        config["dist_type"] = "erk"
    if algorithm in FROM_THE_START:
        config["scheduler"] = sparsity.PeriodicSchedule(max(1, end // MASK_UPDATES), 0, end)
    elif algorithm == "acdc":
        phase = max(1, (end - start) // PHASES)
        config["scheduler"] = sparsity.PeriodicSchedule(phase, start, end)
    elif algorithm == "snip":
        config["scheduler"] = sparsity.OneShotSchedule(0)
    elif not algorithm.endswith("_ste"):
        ramp = sparsity.PolynomialSchedule(max(1, (end - start) // MASK_UPDATES), start, end)
        config["scheduler"] = ramp
    if algorithm in MOVERS:
        config["drop_fraction_fn"] = optax.cosine_decay_schedule(DROP_FRACTION, end)
    return sparsity.create_updater_from_config(config)


def run_seeds(task: Task, algorithm: str, target: float, **options: Any) -> dict[str, list[float]]:
    """Trains all seeds of a task in one compiled program; returns the metrics of each.

    Every seed has its own data order, initial weights and random masks: the updater is made inside
    the batched function, with a traced key. Steps are counted alike in all of them, so that a mask
    update stays a conditional and costs nothing in other steps.

    Args:
      task: what to train on.
      algorithm: its name in the registry.
      target: fraction of the weights to remove.
      **options: as in `make_updater`.
    """

    @jax.jit
    @jax.vmap
    def train(seed: jax.Array) -> Metrics:
        key, mask_key = jax.random.split(jax.random.key(seed))
        updater = make_updater(algorithm, target, task.settings["steps"], mask_key, **options)
        return task.train(key, updater)

    return {name: x.tolist() for name, x in train(jnp.arange(task.seeds)).items()}


def fit(
    key: jax.Array,
    updater: sparsity.BaseUpdater,
    params: chex.ArrayTree,
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[[chex.ArrayTree, jax.Array], jax.Array],
    steps: int,
    model: Callable[[chex.ArrayTree, jax.Array], jax.Array] | None = None,
    example: jax.Array | None = None,
) -> chex.ArrayTree:
    """Trains for `steps` steps.

    Args:
      key: random key.
      updater: wraps the optimizer.
      params: initial parameters.
      optimizer: any optax transformation.
      loss_fn: from parameters and a random key, which draws the batch, to the loss.
      steps: updates of the optimizer.
      model: what SynFlow scores, from parameters and inputs to outputs.
      example: inputs of the model, a batch of one.

    Returns:
      The parameters as the model uses them: those of a sparse network.
    """

    def train(params: chex.ArrayTree, masks: chex.ArrayTree | None = None) -> chex.ArrayTree:
        tx = updater.wrap_optax(optimizer, masks=masks)

        def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
            params, state = carry
            grads = jax.grad(lambda p: loss_fn(updater.pre_forward_update(p, state), key))(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (updater.post_gradient_update(params, state), state), None

        start = params, tx.init(params)
        (params, state), _ = jax.lax.scan(step, start, jax.random.split(key, steps))
        return updater.pre_forward_update(params, state)

    if not isinstance(updater, GivenMasks):
        return train(params)
    if updater.masks_by == "lottery_ticket":
        rate = 1 - (1 - updater.target) ** (1 / ROUNDS)
        return sparsity.lottery_ticket(train, params, ROUNDS, rate)[-1][-1]
    return train(
        *sparsity.prune_at_init(
            updater.masks_by,
            params,
            updater.target,
            loss_fn=loss_fn,
            fn=model,
            batches=jax.random.split(jax.random.fold_in(key, 0), BATCHES),
            inputs=example,
        )
    )


def fit_classifier(
    key: jax.Array,
    updater: sparsity.BaseUpdater,
    *,
    data: tuple[np.ndarray, ...],
    init: Callable[[jax.Array], chex.ArrayTree],
    model: Callable[[chex.ArrayTree, jax.Array], jax.Array],
    settings: dict[str, Any],
) -> Metrics:
    """Trains a classifier by AdamW on random batches; returns its test accuracy in percent.

    Args:
      key: random key.
      updater: wraps the optimizer.
      data: (train inputs, train labels, test inputs, test labels).
      init: from a random key to parameters.
      model: from parameters and inputs to logits [batch, classes].
      settings: of the task; its `batch`, `steps`, `adamw` (peak learning rate) and `weight_decay`.
    """
    x, labels, test_x, test_labels = map(jnp.asarray, data)
    steps = settings["steps"]
    init_key, key = jax.random.split(key)

    def loss_fn(params: chex.ArrayTree, key: jax.Array) -> jax.Array:
        chosen = jax.random.randint(key, (settings["batch"],), 0, len(x))
        return cross_entropy(model(params, x[chosen]), labels[chosen])

    rate = warmup_cosine(settings["adamw"], steps)
    optimizer = optax.adamw(rate, weight_decay=settings["weight_decay"])
    params = fit(key, updater, init(init_key), optimizer, loss_fn, steps, model, x[:1])
    right = model(params, test_x).argmax(-1) == test_labels
    return {"metric": 100 * right.mean(), "sparsity": sparsity_of(params)}


def sparsity_of(params: chex.ArrayTree) -> jax.Array:
    """Fraction of zeros among the weights that can be pruned: those of matrices and kernels."""
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    return sum(jnp.sum(leaf == 0) for leaf in kernels) / sum(leaf.size for leaf in kernels)


def warmup_cosine(peak: float, steps: int) -> optax.Schedule:
    """Learning rate: up to `peak` in the first 5 % of the steps, then a cosine down to zero."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 20, steps)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all leading axes, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def dense(key: jax.Array, *shape: int, gain: float = 2.0) -> chex.ArrayTree:
    """A kernel of that shape, the last axis its outputs, and a bias."""
    fan_in = 1
    for size in shape[:-1]:
        fan_in *= size
    kernel = jax.random.normal(key, shape) * (gain / fan_in) ** 0.5
    return {"kernel": kernel, "bias": jnp.zeros(shape[-1])}


def apply_dense(layer: chex.ArrayTree, x: jax.Array) -> jax.Array:
    """x @ kernel + bias."""
    return x @ layer["kernel"] + layer["bias"]
