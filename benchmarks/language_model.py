"""SmolLM2-135M cut by depth, by hidden units and by both, and trained, beside others of its size.

Needs the environment of the example and the folder `dense` that it writes:

    bash run.sh example language_model
    examples/language_model/.venv/bin/python -m benchmarks.language_model [--quick] [--write]

Shares are those of the multiply-adds of the layers; the head, 19 % of a call, stays whole. Blocks
go by cosine, hidden units by Taylor terms of all layers together. Dense models of equal size have
evenly spaced layers. Each model trains for 300 steps of 2 windows of 128 tokens on the loss of the
tokens plus the divergence from the dense model. Rows are files in runs/language_model/cuts, which a
second call reads. Times are those of models with 0.65 of the multiply-adds.

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from benchmarks import results
from sparsity.reports import time_in_turn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "language_model"))

import evaluate  # noqa: E402
import llama  # noqa: E402
import texts  # noqa: E402

HEADING = "## A language model, cut"
RUNS = ROOT / "runs" / "language_model"
SHARES = (0.9, 0.8, 0.65, 0.5)
KINDS = {  # kinds of models, and the shares at which each is measured
    "blocks": SHARES,
    "hidden units": SHARES,
    "both": SHARES,
    "spaced layers": SHARES,
    "unstructured": SHARES,
    "2:4": (0.5,),
}
HEAD = ["layers' MACs", "model", "bytes", "essay", "handbook", "trained: essay", "handbook"]
STEPS, LENGTH, BATCH = 300, 128, 2


class Data(NamedTuple):
    """The model, what it is cut and trained with, and what it is tested by."""

    config: dict[str, Any]
    model: llama.ModelFn
    dense: llama.Params
    batches: list[dict[str, jax.Array]]  # of calibration
    training: np.ndarray  # [steps, batch, length]
    tests: Mapping[str, np.ndarray]


def read_data(steps: int) -> Data:
    source = RUNS / "dense"
    config, tokenizer = evaluate.read_config(source), evaluate.read_tokenizer(source)
    manual = texts.read_manual()
    windows = texts.split_tokens(tokenizer, manual, LENGTH, BATCH * steps)
    windows = np.random.default_rng(0).permutation(windows)
    calibration = texts.split_tokens(tokenizer, manual, 512, 8)
    return Data(
        config,
        llama.make_model(config),
        evaluate.load_params(source),
        [{"tokens": jnp.asarray(tokens[None])} for tokens in calibration],
        windows.reshape(-1, BATCH, LENGTH),
        {n: texts.split_tokens(tokenizer, x, 512)[:4] for n, x in texts.read_tests().items()},
    )


# The cuts.


def measure_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of the tokens after the first of each window."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.mean(losses)


def count_layer_macs(graph: sparsity.Graph) -> int:
    return graph.macs() - graph.costs.count_macs(("model.embed_tokens.weight",))


def drop_blocks(data: Data, graph: sparsity.Graph, number: int, order: list[str]) -> Any:
    masks = graph.drop(data.dense, order[:number])
    return sparsity.shrink(graph, data.dense, masks)


def cut_hidden(data: Data, model: Any, params: llama.Params, graph: Any, share: float) -> Any:
    """Removes hidden units until a share of the multiply-adds of `graph` remains."""

    def loss(params: llama.Params, batch: dict[str, jax.Array]) -> jax.Array:
        return measure_entropy(model(params, batch), batch["tokens"])

    importance = sparsity.rank_groups(
        graph, params, data.batches, "taylor", groups="hidden", loss_fn=loss
    )
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, importance=importance, across=True),
        sparsity_distribution_fn=sparsity.budget(graph, macs=share),
    )
    return sparsity.shrink(graph, *pruner.instant_sparsify(params))


def cut(data: Data, kind: str, share: float) -> llama.Params:
    """Returns the parameters of a Llama whose layers keep a share of their multiply-adds."""
    graph = sparsity.trace(data.model, data.dense, data.batches[0])
    blocks, full = len(graph.blocks), count_layer_macs(graph)
    if kind == "spaced layers":
        return take_layers(
            data.dense, np.linspace(0, blocks - 1, round(blocks * share)).astype(int)
        )
    order = [*sparsity.rank_groups(graph, data.dense, data.batches, "cosine")]
    dropped = {"blocks": 1 - share, "hidden units": 0, "both": (1 - share) / 3}[kind]
    small = drop_blocks(data, graph, int(np.ceil(blocks * dropped - 1e-9)), order)
    if kind != "blocks":
        remaining = small.graph
        excess = count_layer_macs(remaining) - share * full
        target = 1 - excess / remaining.macs()
        small = cut_hidden(data, small.apply, small.params, remaining, target)
    check_small(data, small)
    return take_layers(small.params)


def take_layers(params: llama.Params, layers: Any = None) -> llama.Params:
    """Returns a Llama of some layers, by default those that a cut has not emptied, renumbered."""
    if layers is None:
        name = "model.layers.{}.self_attn.o_proj.weight"
        numbers = {int(x.split(".")[2]) for x in params if x.startswith("model.layers.")}
        layers = [i for i in sorted(numbers) if params[name.format(i)].size]
    prefixes = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(layers)}
    taken = {}
    for name, array in params.items():
        start = ".".join(name.split(".")[:3]) + "."
        if start in prefixes:
            taken[prefixes[start] + name.removeprefix(start)] = array
        elif not name.startswith("model.layers."):
            taken[name] = array
    return taken


def make_small_model(data: Data, params: llama.Params) -> llama.ModelFn:
    layers = sum(name.endswith("o_proj.weight") for name in params)
    return llama.make_model({**data.config, "num_hidden_layers": layers})


def check_small(data: Data, small: Any) -> None:
    """Raises unless an ordinary Llama of the smaller arrays computes what `small.apply` does."""
    params = take_layers(small.params)
    expected = small.apply(small.params, data.batches[0])
    logits = make_small_model(data, params)(params, data.batches[0])
    np.testing.assert_allclose(logits, expected, atol=2e-3)


# Recovery.


def recover(data: Data, model: llama.ModelFn, params: llama.Params, tx: Any) -> llama.Params:
    """Trains by the tokens and by the logits of the dense model."""

    def loss(params: llama.Params, expected: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = model(params, {"tokens": tokens})
        divergence = optax.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(expected))
        return measure_entropy(logits, tokens) + jnp.mean(divergence)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: llama.Params, state: Any, dense: llama.Params, tokens: jax.Array) -> Any:
        expected = data.model(dense, {"tokens": tokens})
        grads = jax.grad(loss)(params, expected, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.copy, params), tx.init(params)
    for tokens in data.training:
        params, state = step(params, state, data.dense, tokens)
    return params


def make_optimizer(learning_rate: float = 2e-4) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, STEPS // 10, STEPS)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


# Rows.


def prune_oneshot(data: Data, share: float, kind: str) -> llama.Params:
    """Prunes single weights of the layers with Wanda and ADMM, to the bytes of a cut model."""
    # bfloat16: kept values of 16 bits, and a bit for each weight of the mask.
    rate = 0.5 if kind == "2:4" else 1 - (16 * share - 1) / 16
    pruner = sparsity.WandaPruning(
        sparsity_distribution_fn=sparsity.Uniform(rate, filter_fn=lambda p, _: "proj" in p[-1]),
        sparsity_type=sparsity.NByM(2, 4) if kind == "2:4" else sparsity.Unstructured(),
    )
    return sparsity.oneshot(pruner, data.model, data.dense, data.batches, sparsity.ADMM(), held=())[
        0
    ]


def measure_row(data: Data, kind: str, share: float) -> dict[str, Any]:
    def test(model: llama.ModelFn, params: llama.Params) -> dict[str, float]:
        return {n: evaluate.measure_perplexity(model, params, x) for n, x in data.tests.items()}

    if kind in ("unstructured", "2:4"):
        params = prune_oneshot(data, share, kind)
        size = sum(x.size for n, x in params.items() if "proj" not in n)
        weights = [x for n, x in params.items() if "proj" in n]
        kept = sum(int((x != 0).sum()) for x in weights)
        nbytes = 2 * (size + kept) + sum(x.size for x in weights) // 8
        return {"kind": kind, "share": share, "bytes": nbytes, "before": test(data.model, params)}
    params = cut(data, kind, share)
    model = make_small_model(data, params)
    trained = recover(data, model, params, make_optimizer())
    return {
        "kind": kind,
        "share": share,
        "bytes": 2 * sum(x.size for x in params.values()),
        "before": test(model, params),
        "after": test(model, trained),
    }


# Time.


def make_step(config: Mapping[str, Any]) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns `fn(params, cache, token, position)`: logits [vocabulary], and the cache.

    The cache has keys and values [2, length, heads, size] of each layer.
    """
    groups, eps = config["num_key_value_heads"], config["rms_norm_eps"]
    size = config["hidden_size"] // config["num_attention_heads"]

    def rotate(x: jax.Array, position: jax.Array) -> jax.Array:
        angles = position * config["rope_theta"] ** (-jnp.arange(0, size, 2) / size)
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def run(params: llama.Params, cache: list[jax.Array], token: jax.Array, position: Any) -> Any:
        x, caches = params["model.embed_tokens.weight"][token], []
        for layer, stored in enumerate(cache):
            weights = functools.partial(read_weight, params, layer)
            y = llama.normalize(x, weights("input_layernorm"), eps)
            q, k, v = (
                (weights(f"self_attn.{n}_proj") @ y).reshape(-1, size) for n in ("q", "k", "v")
            )
            entry = jnp.stack([rotate(k, position), v])[:, None]
            stored = jax.lax.dynamic_update_slice_in_dim(stored, entry, position, 1)
            caches.append(stored)
            scores = jnp.einsum(
                "ghd,tgd->ght", rotate(q, position).reshape(groups, -1, size), stored[0]
            )
            scores = jnp.where(jnp.arange(stored.shape[1]) <= position, scores / size**0.5, -1e30)
            mixed = jnp.einsum("ght,tgd->ghd", jax.nn.softmax(scores), stored[1]).reshape(-1)
            x = x + weights("self_attn.o_proj") @ mixed
            y = llama.normalize(x, weights("post_attention_layernorm"), eps)
            hidden = jax.nn.silu(weights("mlp.gate_proj") @ y) * (weights("mlp.up_proj") @ y)
            x = x + weights("mlp.down_proj") @ hidden
        x = llama.normalize(x, params["model.norm.weight"], eps)
        return params["model.embed_tokens.weight"] @ x, caches

    return run


def read_weight(params: llama.Params, layer: int, name: str) -> jax.Array:
    return params[f"model.layers.{layer}.{name}.weight"]


def make_caller(data: Data, params: llama.Params, kind: str) -> Callable[[], Any]:
    """Returns a call of a decoding step with 256 positions, or of a batch of 512 tokens."""
    if kind == "batch":
        return functools.partial(jax.jit(make_small_model(data, params)), params, data.batches[0])
    layers = sum(name.endswith("o_proj.weight") for name in params)
    heads = data.config["num_key_value_heads"]
    size = data.config["hidden_size"] // data.config["num_attention_heads"]
    cache = [jnp.zeros((2, 256, heads, size))] * layers
    step = jax.jit(make_step(data.config))
    return functools.partial(step, params, cache, jnp.int32(5), jnp.int32(200))


def check_step(data: Data) -> None:
    """Raises unless steps with a cache compute the logits of the model."""
    tokens, step = data.batches[0]["tokens"][0, :5], jax.jit(make_step(data.config))
    expected = data.model(data.dense, {"tokens": tokens[None]})[0]
    heads, size = data.config["num_key_value_heads"], data.config["hidden_size"]
    size //= data.config["num_attention_heads"]
    cache = [jnp.zeros((2, 8, heads, size))] * data.config["num_hidden_layers"]
    for position, token in enumerate(tokens):
        logits, cache = step(data.dense, cache, token, jnp.int32(position))
        np.testing.assert_allclose(logits, expected[position], atol=2e-3)


def measure_times(data: Data, kind: str, share: float) -> dict[str, float]:
    """Returns small over dense: the time of a decoding step, and of a batch of 512 tokens."""
    params, ratios = cut(data, kind, share), {}
    for call, rounds in (("step", 40), ("batch", 10)):
        pair = [make_caller(data, x, call) for x in (data.dense, params)]
        before, after = time_in_turn(*pair, rounds=rounds)
        ratios[call] = after / before
    return ratios


def read_or_measure(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measure(), indent=1))
        jax.clear_caches()  # programs hold arrays of gigabytes
    return dict(json.loads(file.read_text()))


def make_line(row: Mapping[str, Any]) -> list[str]:
    before, after = list(row["before"].values()), list(row.get("after", {}).values())
    texts = [f"{x:,.1f}" for x in before] + ([f"{x:,.1f}" for x in after] or ["", ""])
    return [f"{row['share']:.2f}", row["kind"], f"{row['bytes'] / 1e6:.0f} MB", *texts]


def main() -> None:
    parser = results.Parser(__doc__, quick="one share, 2 steps")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of models, by comma")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="shares, by comma")
    options = parser.read()
    shares = [0.8] if options.quick else [*map(float, options.shares.split(","))]
    data = read_data(2 if options.quick else STEPS)
    check_step(data)
    folder, lines = RUNS / ("cuts_quick" if options.quick else "cuts"), []
    for share in shares:
        for kind in (kind for kind in options.kinds.split(",") if share in KINDS[kind]):
            file = folder / f"{kind}_{share}.json".replace(" ", "_").replace(":", "")
            row = read_or_measure(file, functools.partial(measure_row, data, kind, share))
            lines.append(make_line(row))
            print(*lines[-1], flush=True)
    times = []
    for kind in (x for x in ("blocks", "hidden units", "both") if x in options.kinds):
        file = folder / f"time_{kind}.json".replace(" ", "_")
        ratios = read_or_measure(file, functools.partial(measure_times, data, kind, 0.65))
        times.append([kind, *(f"{x:.2f}" for x in ratios.values())])
    time_head = ["model", "decoding step", "batch of 512 tokens"]
    text = "\n\n".join([HEADING, results.table(HEAD, lines), results.table(time_head, times)])
    print(f"\n{text}")
    if options.write:
        results.write_section(text)


if __name__ == "__main__":
    main()
