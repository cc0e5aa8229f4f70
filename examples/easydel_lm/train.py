"""Trains a small Llama with easydel: dense, 2:4 and by RigL. Easydel calls the pruner."""

from __future__ import annotations

import argparse
import functools
import math
import pydoc_data.topics
import sys
import tempfile

import easydel
import jax
import jax.numpy as jnp
import numpy as np
import optax
from datasets import Dataset
from flax import nnx

import sparsity
from sparsity import sparsity_distributions

LENGTH, BATCH, ACCUMULATED = 64, 16, 2  # characters a line, lines a batch, batches a step
HIGHEST_LOSS = 2.6  # nats a character, which every model has to undercut; chance is 4.85


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the help texts of Python as ASCII codes: to train with, and to test with."""
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    return codes[:-20_000], codes[-20_000:]


def draw_lines(codes: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Returns lines that start at random characters, int32[count, LENGTH]."""
    starts = np.random.default_rng(seed).integers(0, len(codes) - LENGTH, (count, 1))
    return codes[starts + np.arange(LENGTH)]


def make_model() -> easydel.LlamaForCausalLM:
    config = easydel.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.09,  # 1 / sqrt(hidden_size), to learn in few steps
        attn_mechanism="vanilla",  # the others want a GPU or a TPU
    )
    return easydel.LlamaForCausalLM(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )


def in_layers(path: tuple[str, ...], param: jax.Array) -> bool:
    """Chooses what is sparse: all matrices but the embedding and the output."""
    return "layers" in path and param.ndim > 1


def make_pruners(steps: int) -> dict[str, sparsity.BaseUpdater]:
    uniform = functools.partial(sparsity_distributions.uniform, filter_fn=in_layers)
    start, end = steps // 10, steps * 2 // 3
    return {
        "dense": sparsity.NoPruning(),
        "2:4": sparsity.MagnitudePruning(
            sparsity_type=sparsity.NByM(2, 4, axis=-2),  # the axis that a product sums over
            sparsity_distribution_fn=functools.partial(uniform, sparsity=0.5),
            scheduler=sparsity.PolynomialSchedule(10, start, end),
        ),
        "RigL": sparsity.RigL(
            sparsity_distribution_fn=functools.partial(uniform, sparsity=0.8),
            scheduler=sparsity.PeriodicSchedule(10, start, end),
            drop_fraction_fn=optax.cosine_decay_schedule(0.3, end),
        ),
    }


def train(pruner: sparsity.BaseUpdater, name: str, steps: int) -> easydel.EasyDeLState:
    """Returns the state after `steps` steps; the pruner is one more argument of the trainer."""
    lines = draw_lines(load_text()[0], steps * BATCH * ACCUMULATED, seed=1)
    columns = {"input_ids": lines, "labels": lines, "attention_mask": np.ones_like(lines)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = easydel.TrainingArguments(
            pruning_module=pruner,
            optimizer="adamw",
            scheduler="cosine",
            learning_rate=3e-3,
            num_train_epochs=1,
            max_training_steps=steps,
            total_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            max_length=LENGTH,
            model_name=name,
            save_directory=folder,
            do_last_save=False,
            use_wandb=False,
            progress_bar_type="tqdm",
        )
        trainer = easydel.Trainer(
            arguments=arguments,
            model=make_model(),
            dataset_train=Dataset.from_dict({key: list(x) for key, x in columns.items()}),
        )
        return trainer.train().state


def test_loss(state: easydel.EasyDeLState) -> float:
    """Returns the loss on text that was not trained with, in nats a character."""
    lines = jnp.asarray(draw_lines(load_text()[1], 20 * BATCH, seed=2))
    model = state.model
    with model.mesh:
        logits = model(input_ids=lines).logits[:, :-1]
    return float(jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, lines[:, 1:])))


def check(state: easydel.EasyDeLState, pruner: sparsity.BaseUpdater, steps: int) -> str:
    """Returns what was reached; ends the program if it is not what it should be."""
    weights, opt_state = state.graphstate, state.opt_state
    for layer in sparsity.reports.layer_summary(weights, opt_state, pruner):
        if layer.target is not None:
            wrong = abs(layer.achieved - layer.target) * math.prod(layer.shape)
            if wrong > 0.51:  # a mask keeps a whole number of weights; float32 rounds the target
                sys.exit(f"error: {layer.path} has {wrong:.0f} wrong zeros")
    for path, weight in nnx.to_flat_state(weights):
        if isinstance(pruner.sparsity_type, sparsity.NByM) and in_layers(path, weight):
            groups = np.asarray(weight[...]).T.reshape(-1, 4)
            if np.count_nonzero(groups, axis=1).max() > 2:
                sys.exit(f"error: {path} is not 2:4")
    sparse_state = sparsity.get_sparse_state(opt_state)
    if sparse_state.count != steps:
        sys.exit(f"error: masks counted {sparse_state.count} steps of {steps}")
    loss = test_loss(state)
    if not loss < HIGHEST_LOSS:
        sys.exit(f"error: the loss is {loss:.3f}, it should be below {HIGHEST_LOSS}")
    total = sparsity.summarize_sparsity(sparse_state.masks)["_total_sparsity"]
    return f"loss {loss:.3f}, sparsity of the layers {total:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of the optimizer")
    steps = parser.parse_args().steps
    results = {}
    for name, pruner in make_pruners(steps).items():
        # Easydel would keep compiled programs in the home directory.
        jax.config.update("jax_enable_compilation_cache", False)
        results[name] = check(train(pruner, name, steps), pruner, steps)
    print(*(f"{name:6}  {result}" for name, result in results.items()), sep="\n")


if __name__ == "__main__":
    main()
