"""A Llama of two layers for tunix's PeftTrainer, and texts that come with Python."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer

import sparsity

LENGTH, BATCH = 64, 16  # characters a line, lines a batch
RANK, ALPHA = 4, 8.0  # of adapters


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the help texts of Python as ASCII codes: to train with, and to test with."""
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    return codes[:-20_000], codes[-20_000:]


def batches(codes: np.ndarray, count: int, seed: int) -> Iterator[peft_trainer.TrainingInput]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(0, len(codes) - LENGTH, (BATCH, 1))
        lines = codes[starts + np.arange(LENGTH)]
        yield peft_trainer.TrainingInput(input_tokens=lines, input_mask=np.ones_like(lines, bool))


def model_input(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
    """Adds what the model wants beside the tokens: positions, and who may see whom."""
    count, length = batch.input_tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), (count, length)),
        "attention_mask": jnp.broadcast_to(causal, (count, length, length)),
    }


def make_model() -> llama.Llama3:
    sizes = {"num_layers": 2, "vocab_size": 128, "embed_dim": 128, "hidden_dim": 256}
    heads = {"num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
    config = llama.ModelConfig(**sizes, **heads, rope_theta=10_000, norm_eps=1e-5)
    rngs, draw = nnx.Rngs(0), nnx.initializers.lecun_normal()
    model = llama.Llama3(config, rngs=rngs)
    # tunix expects weights from a checkpoint and makes these zeros, of which nothing can be learnt.
    for layer in model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.kernel[...] = draw(rngs.params(), linear.kernel.shape)
    return model


def make_call() -> tuple[Callable[..., jax.Array], nnx.State, tuple[Any, ...]]:
    """Returns the model as a function of its weights and of what its call takes, and both."""
    definition, weights = nnx.split(make_model(), nnx.Param)
    inputs = model_input(next(batches(load_text()[0], 1, seed=1)))
    call = (inputs["input_tokens"], inputs["positions"], None, inputs["attention_mask"])
    return lambda weights, *call: nnx.merge(definition, weights)(*call), weights, call


def add_adapters(model: nnx.Module, seed: int) -> nnx.Module:
    """Returns the model with adapters of qwix."""
    inputs = model_input(next(batches(load_text()[0], 1, seed=3)))
    del inputs["input_mask"]  # only the loss wants it
    provider = qwix.LoraProvider(module_path="layers/.*", rank=RANK, alpha=ALPHA)
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(seed), cache=None, **inputs)


def read_adapters(model: nnx.Module) -> dict[str, Any]:
    """Returns the pairs of factors of qwix's adapters, at the paths of their weights."""
    factors = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    pairs = {
        (*path[:-1], name.removesuffix("_lora_a")): (
            a[...],
            factors[*path[:-1], f"{name.removesuffix('_lora_a')}_lora_b"][...],
        )
        for path, a in factors.items()
        if (name := path[-1]).endswith("_lora_a")
    }
    return nnx.traversals.unflatten_mapping(pairs)


class CompactModel(nnx.Module):
    """The kept values of a model, with its call: values are trained, their positions are not.

    Args:
      compact: the model.
      trains_dense: whether to train parameters without a mask.
    """

    def __init__(
        self, compact: sparsity.compacting.Compact[nnx.State], trains_dense: bool = True
    ) -> None:
        values, self.weights_structure = jax.tree.flatten(compact.params)
        positions, self.structure = jax.tree.flatten(compact)
        masked = jax.tree.leaves(compact.indices, is_leaf=lambda x: x is None)
        self.values = nnx.List(
            nnx.Variable(x) if at is None and not trains_dense else nnx.Param(x)
            for x, at in zip(values, masked, strict=True)
        )
        self.positions = nnx.List(nnx.Variable(x) for x in positions)

    def read(self) -> tuple[sparsity.compacting.Compact[nnx.State], nnx.State]:
        """Returns the compact model, and its parameters as they are now."""
        values, positions = ([x[...] for x in each] for each in (self.values, self.positions))
        weights = jax.tree.unflatten(self.weights_structure, values)
        return jax.tree.unflatten(self.structure, positions), weights

    def __call__(self, *call: Any) -> Any:
        compact, weights = self.read()
        return compact.apply(weights, *call)


def num_weights(tree: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
