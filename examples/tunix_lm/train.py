"""Trains a small Llama with tunix: dense, 2:4, by RigL, on kept values, and then cut in half."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tiny_llama import (
    ALPHA,
    RANK,
    CompactModel,
    add_adapters,
    batches,
    load_text,
    make_call,
    make_model,
    model_input,
    num_weights,
    read_adapters,
)
from tunix.sft import peft_trainer

import sparsity
from sparsity import sparsity_distributions

ACCUMULATED = 2  # batches a step
HIGHEST_LOSS = 2.1  # nats a character, which every model has to undercut; chance is 4.85


def in_layers(path: tuple[str, ...], param: jax.Array) -> bool:
    """Chooses what is sparse: all matrices but the embedding and the output."""
    return path[0] == "layers" and param.ndim > 1


def two_of_four(path: tuple[str, ...], param: jax.Array) -> sparsity.NByM:
    """2:4 along the axis that a product sums over.

    It is the last but one, except for queries, keys and values, which are [in, head, out].
    """
    return sparsity.NByM(2, 4, axis=-3 if path[-2] in ("q_proj", "k_proj", "v_proj") else -2)


def make_pruners(steps: int) -> dict[str, sparsity.BaseUpdater]:
    fn, weights, call = make_call()
    graph = sparsity.trace(fn, weights, *call)
    uniform = functools.partial(sparsity_distributions.uniform, filter_fn=in_layers)
    start, end = steps // 10, steps * 2 // 3
    return {
        "dense": sparsity.NoPruning(),
        "2:4": sparsity.MagnitudePruning(
            sparsity_type=two_of_four,
            sparsity_distribution_fn=functools.partial(uniform, sparsity=0.5),
            scheduler=sparsity.PolynomialSchedule(10, start, end),
        ),
        "RigL": sparsity.RigL(
            sparsity_distribution_fn=functools.partial(uniform, sparsity=0.8),
            scheduler=sparsity.PeriodicSchedule(10, start, end),
            drop_fraction_fn=optax.cosine_decay_schedule(0.3, end),
        ),
        "halved": sparsity.MagnitudePruning(
            scope=sparsity.Coupled(graph),
            sparsity_distribution_fn=sparsity.budget(graph, macs=0.5),
            scheduler=sparsity.PolynomialSchedule(10, start, end),
        ),
    }


def train(pruner: sparsity.BaseUpdater, name: str, steps: int) -> peft_trainer.PeftTrainer:
    tx = optax.adamw(optax.cosine_decay_schedule(2e-3, steps))
    tx = pruner.wrap_optax(tx)
    return run_trainer(make_model(), tx, name, steps, seed=1)


def run_trainer(
    model: nnx.Module, tx: optax.GradientTransformation, name: str, steps: int, seed: int
) -> peft_trainer.PeftTrainer:
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=steps,
        max_steps=steps,
        # Masks count and change with the steps of the optimizer, not the batches; `check` looks.
        gradient_accumulation_steps=ACCUMULATED,
        pbar_description=name,
    )
    trainer = peft_trainer.PeftTrainer(model, tx, config)
    trainer.with_gen_model_input_fn(model_input)
    trainer.train(batches(load_text()[0], steps * ACCUMULATED, seed))
    return trainer


def train_kept(trainer: peft_trainer.PeftTrainer, graph: sparsity.Graph, steps: int) -> str:
    """Trains the kept values of a pruned model on, half as long, and puts them back into the model.

    Returns:
      The memory of a step.
    """
    weights = nnx.state(trainer.model, nnx.Param)
    masks = sparsity.get_sparse_state(trainer.optimizer.opt_state).masks
    model = CompactModel(sparsity.compact(graph, weights, masks))
    tuner = run_trainer(model, optax.adamw(5e-4), "kept", steps // 2, seed=5)
    compact, weights = model.read()
    nnx.update(trainer.model, compact.dense(weights))
    return describe_memory(tuner)


def describe_memory(trainer: peft_trainer.PeftTrainer) -> str:
    """Returns the bytes of the compiled step: arguments and temporaries."""
    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    batch = next(batches(load_text()[0], 1, seed=1))
    short = peft_trainer.TrainingInput(
        input_tokens=batch.input_tokens[:1, :8], input_mask=batch.input_mask[:1, :8]
    )
    sizes = []
    for each in (batch, short):
        memory = step.lower(trainer.model, trainer.optimizer, each).compile().memory_analysis()
        sizes.append((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6)
    return f"a step takes {sizes[0]:.1f} MB, {sizes[1]:.1f} MB of one short line"


def merge_adapters(trainer: peft_trainer.PeftTrainer, steps: int) -> float:
    """Trains qwix's adapters of a pruned model, and merges them into it under its masks.

    Returns:
      The sparsity that its layers would have without masks.
    """
    adapted = add_adapters(trainer.model, seed=3)
    config = peft_trainer.TrainingConfig(eval_every_n_steps=steps, max_steps=steps)
    tuner = peft_trainer.PeftTrainer(adapted, optax.adamw(2e-3), config)
    tuner.with_gen_model_input_fn(model_input)
    tuner.train(batches(load_text()[0], steps, seed=4))

    weights = nnx.state(trainer.model, nnx.Param)
    masks = sparsity.get_sparse_state(trainer.optimizer.opt_state).masks
    lora = read_adapters(tuner.model)
    no_masks = jax.tree.map(lambda _: None, weights)
    plain = sparsity.merge_lora(weights, lora, no_masks, scale=ALPHA / RANK)
    nnx.update(trainer.model, sparsity.merge_lora(weights, lora, masks, scale=ALPHA / RANK))
    matrices = [w[...] for _, w in nnx.to_flat_state(plain["layers"]) if w.ndim > 1]
    return sum(np.sum(w == 0) for w in map(np.asarray, matrices)) / sum(w.size for w in matrices)


def shrink(trainer: peft_trainer.PeftTrainer, graph: sparsity.Graph) -> str:
    """Cuts the masked channels; returns what that saves. The smaller model has the same loss."""
    weights = nnx.state(trainer.model, nnx.Param)
    masks = sparsity.get_sparse_state(trainer.optimizer.opt_state).masks
    small = sparsity.shrink(graph, weights, masks)

    def loss_fn(weights: nnx.State, batch: peft_trainer.TrainingInput) -> jax.Array:
        model = functools.partial(small.apply, weights)
        return trainer.loss_fn(model, **model_input(batch))

    loss, masked = test_loss(jax.jit(loss_fn), small.params), trained_loss(trainer)
    if abs(loss - masked) > 1e-4:
        sys.exit(f"error: the loss is {masked:.4f}, that of the smaller model {loss:.4f}")
    macs, size = small.macs() / graph.macs(), num_weights(small.params) / num_weights(weights)
    return f"loss {loss:.3f}, cut: {macs:.0%} of the multiply-adds, {size:.0%} of the weights"


def test_loss(loss_fn: Callable[..., jax.Array], model: Any) -> float:
    """Returns the loss on text that was not trained with, in nats a character."""
    test = batches(load_text()[1], 20, seed=2)
    return float(np.mean([loss_fn(model, batch) for batch in test]))


def trained_loss(trainer: peft_trainer.PeftTrainer) -> float:
    loss_fn = nnx.jit(lambda model, batch: trainer.loss_fn(model, **model_input(batch)))
    return test_loss(loss_fn, trainer.model)


def check(trainer: peft_trainer.PeftTrainer, pruner: sparsity.BaseUpdater, steps: int) -> str:
    """Returns what was reached; ends the program if it is not what it should be."""
    weights, opt_state = nnx.state(trainer.model, nnx.Param), trainer.optimizer.opt_state
    for layer in sparsity.reports.layer_summary(weights, opt_state, pruner):
        # Of coupled channels the scope decides how many zeros a matrix has; `shrink` looks.
        if layer.target is not None and not isinstance(pruner.scope, sparsity.Coupled):
            wrong = abs(layer.achieved - layer.target) * math.prod(layer.shape)
            if wrong > 0.51:  # a mask keeps a whole number of weights; float32 rounds the target
                sys.exit(f"error: {layer.path} has {wrong:.0f} wrong zeros")
    if pruner.sparsity_type is two_of_four:
        for path, weight in nnx.to_flat_state(weights["layers"]):
            if weight.ndim > 1:
                groups = np.moveaxis(weight[...], two_of_four(path, weight).axis, -1)
                if np.count_nonzero(groups.reshape(-1, 4), axis=1).max() > 2:
                    sys.exit(f"error: {path} is not 2:4")
    state = sparsity.get_sparse_state(opt_state)
    if state.count != steps:
        sys.exit(f"error: masks counted {state.count} steps of {steps}")
    loss = trained_loss(trainer)
    if not loss < HIGHEST_LOSS:
        sys.exit(f"error: the loss is {loss:.3f}, it should be below {HIGHEST_LOSS}")
    total = sparsity.summarize_sparsity(state.masks)["_total_sparsity"]
    return f"loss {loss:.3f}, sparsity of the layers {total:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of the optimizer")
    steps = parser.parse_args().steps
    pruners = make_pruners(steps)
    graph = pruners["halved"].scope.graph
    results = {}
    for name, pruner in pruners.items():
        trainer = train(pruner, name, steps)
        results[name] = check(trainer, pruner, steps)
        if name == "2:4":
            plain = merge_adapters(trainer, steps)
            results["LoRA"] = check(trainer, pruner, steps) + f" (without masks {plain:.2%})"
        if name in ("dense", "RigL"):
            results[name] += f", {describe_memory(trainer)}"
        if name == "RigL":
            memory = train_kept(trainer, graph, steps)
            results["kept"] = f"{check(trainer, pruner, steps)}, {memory}"
        if name == "halved":
            results["cut"] = shrink(trainer, graph)
    print(*(f"{name:6}  {result}" for name, result in results.items()), sep="\n")


if __name__ == "__main__":
    main()
