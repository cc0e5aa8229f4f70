"""Measures a pruned model: perplexity of texts, errors of layers, a sentence; reads its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
import texts
from safetensors.numpy import load_file

PROMPT = "The capital of France is"


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def read_tokenizer(folder: Path) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def load_params(folder: Path) -> llama.Params:
    return {n: jnp.asarray(x) for n, x in load_file(folder / "model.safetensors").items()}


def measure_perplexity(model: Any, params: llama.Params, windows: Iterable[np.ndarray]) -> float:
    """Returns exp of the mean loss of the tokens after the first of each window."""

    @jax.jit
    def measure(params: llama.Params, tokens: jax.Array) -> jax.Array:
        logits = model(params, {"tokens": tokens[None]})[0, :-1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]))

    return float(np.exp(np.mean([measure(params, tokens) for tokens in windows])))


def generate(model: Any, params: llama.Params, prompt: list[int], number: int) -> list[int]:
    """Returns the prompt with the most likely tokens after it."""
    predict = jax.jit(lambda params, tokens: model(params, {"tokens": tokens})[0].argmax(-1))
    tokens = np.zeros((1, len(prompt) + number), np.int32)
    tokens[0, : len(prompt)] = prompt
    for i in range(len(prompt), tokens.size):
        tokens[0, i] = predict(params, tokens)[i - 1]
    return [int(token) for token in tokens[0]]


def list_errors(
    config: dict[str, Any], dense: llama.Params, pruned: llama.Params, tokens: np.ndarray
) -> list[float]:
    """Returns the relative squared error of the output of each layer: the mean over tokens."""
    run = jax.jit(llama.make_layers(config))
    pairs = zip(run(dense, tokens), run(pruned, tokens), strict=True)
    return [float(jnp.mean(jnp.sum((x - y) ** 2, -1) / jnp.sum(x**2, -1))) for x, y in [*pairs][1:]]


def describe(source: Path, folder: Path) -> dict[str, Any]:
    """Returns the perplexity of each text, the errors of the layers, and a generated sentence."""
    config, tokenizer = read_config(source), read_tokenizer(source)
    model, params = llama.make_model(config), load_params(folder)
    tests = {n: texts.split_tokens(tokenizer, x, 512)[:4] for n, x in texts.read_tests().items()}
    return {
        "perplexity": {n: measure_perplexity(model, params, x) for n, x in tests.items()},
        "errors": list_errors(config, load_params(source), params, tests["handbook"][:1]),
        "sentence": tokenizer.decode(generate(model, params, tokenizer.encode(PROMPT).ids, 20)),
    }
