"""Tasks again, with whole channels removed until only a part of the multiply-adds is left.

`static_sparse` stands for a dense network of that size, trained as long as the others: it lacks
channels from the first step on, and `sparsity.shrink` would cut them without a change in what it
computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax

import sparsity
from baselines import digits_cnn, topics_transformer, training

ROWS = ("no_prune", "magnitude", "saliency", "static_sparse")


@dataclasses.dataclass(frozen=True)
class ChannelTask(training.Task):
    """A task whose sparsities are parts of the multiply-adds.

    Attributes:
      base: the task that trains.
    """

    base: training.Task = dataclasses.field(kw_only=True)


def digits_model(params: chex.ArrayTree, x: jax.Array) -> jax.Array:
    """`digits_cnn.model` with convolutions that are such, of which a graph knows the channels."""
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    for layer in (params["conv1"], params["conv2"]):
        x = lax.conv_general_dilated(x, layer["kernel"], (2, 2), ((1, 0), (1, 0)), **layout)
        x = jax.nn.relu(x + layer["bias"])
    x = jax.nn.relu(training.apply_dense(params["hidden"], x.reshape(x.shape[0], -1)))
    return training.apply_dense(params["logits"], x)


def with_channels(updater: sparsity.BaseUpdater, graph: sparsity.Graph) -> sparsity.BaseUpdater:
    """Returns the updater of channels; its sparsity is the part of the multiply-adds that goes."""
    macs = 1 - updater.sparsity_distribution_fn.sparsity
    return dataclasses.replace(
        updater,
        scope=sparsity.Coupled(graph),
        sparsity_distribution_fn=sparsity.budget(graph, macs=macs),
    )


def channel_task(
    name: str,
    base: training.Task,
    sparsities: tuple[float, ...],
    init: Callable[[jax.Array], chex.ArrayTree],
    model: Callable[[chex.ArrayTree, jax.Array], jax.Array],
    inputs: jax.ShapeDtypeStruct,
) -> ChannelTask:
    """Returns a task like `base`; `model(init(key), inputs)` is what it trains."""

    def train(key: jax.Array, updater: sparsity.BaseUpdater) -> training.Metrics:
        if isinstance(updater, sparsity.NoPruning):
            return base.train(key, updater)
        params = jax.eval_shape(init, jax.random.key(0))
        graph = sparsity.trace(model, params, inputs)
        updater = with_channels(updater, graph)
        targets = updater.sparsity_distribution_fn(params, scope=updater.scope)
        share = (
            graph.costs.count_small_macs(updater.scope.count_channels(params, targets))
            / graph.macs()
        )
        return base.train(key, updater) | {"sparsity": jnp.float32(1 - share)}

    return ChannelTask(
        name=name,
        title=f"{base.title}: whole channels",
        metric=base.metric,
        higher_is_better=base.higher_is_better,
        sparsities=sparsities,
        seeds=base.seeds,
        settings=base.settings,
        train=train,
        base=base,
    )


TASKS = (
    channel_task(
        "digits_channels",
        digits_cnn.TASK,
        (0.75, 0.9),
        digits_cnn.init,
        digits_model,
        jax.ShapeDtypeStruct((1, 28, 28, 1), jnp.float32),
    ),
    channel_task(
        "topics_channels",
        topics_transformer.TASK,
        (0.75,),
        topics_transformer.init,
        topics_transformer.model,
        jax.ShapeDtypeStruct((1, topics_transformer.LENGTH), jnp.int32),
    ),
)
