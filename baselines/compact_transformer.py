"""Trains a wider character transformer in less memory, in several ways; writes COMPACT.md.

    python -m baselines.compact_transformer [--report] [--steps N] [--seeds N]

The text and the recipe are those of `topics_transformer`, at width 256. Pruners follow a ramp to
half of the steps. The second half trains what the row names: masked parameters, their kept values,
or a network without the masked channels. Bytes and times are those of seed 0. Rows of a sparsity
and a seed are stored once they are complete, and are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from baselines import report, store, topics_transformer as task, training
from benchmarks import compact_steps

WIDTH, GROUP, BATCH, STEPS, LEARNING_RATE = 256, 16, 8, 600, 2e-3
SPARSITIES = (0.8, 0.9, 0.95)
SEEDS = 3
ROUNDS = 6  # of measured steps, all rows of a sparsity in turn
RESULTS = store.RESULTS / "compact_transformer.json"
PAGE = store.FOLDER / "COMPACT.md"
LEGEND = {
    "dense": "dense",
    "masked": "magnitude, masked",
    "values": "the same masks, compact (values)",
    "grouped": f"magnitude, FanIn({GROUP}), compact (tuned)",
    "static": f"random FanIn({GROUP}) from the first step, compact (tuned)",
    "channels": "magnitude, `Coupled` and `shrink`",
    "small": "dense, as much state as the row above it",
}


@dataclasses.dataclass
class Run:
    """A network in training.

    Attributes:
      apply: from the model, parameters and text to logits.
      tx: the optimizer.
      params: parameters.
      state: state of the optimizer.
      model: an argument of `apply`: a `Compact`, or nothing.
      seed: of the parameters and of the windows.
    """

    apply: Callable[..., jax.Array]
    tx: optax.GradientTransformation
    params: chex.ArrayTree
    state: chex.ArrayTree
    model: Any = None
    seed: int = 0

    @functools.cached_property
    def step(self) -> tuple[Any, float]:
        """A compiled step, which donates parameters and state, and its CPU-seconds of compiling."""

        def step(
            params: chex.ArrayTree, state: chex.ArrayTree, model: Any, windows: jax.Array
        ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
            grads = jax.grad(lambda params: cross_entropy(self.apply, model, params, windows))
            updates, state = self.tx.update(grads(params), state, params)
            return optax.apply_updates(params, updates), state

        start = time.process_time()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            self.params, self.state, self.model, draw(0, self.seed)
        )
        compiled = lowered.compile()
        return compiled, time.process_time() - start

    def train(self, first: int, last: int) -> Run:
        """Trains from one step to another."""
        for i in range(first, last):
            self.advance(i)
        return self

    def advance(self, i: int) -> chex.ArrayTree:
        self.params, self.state = self.step[0](
            self.params, self.state, self.model, draw(i, self.seed)
        )
        return self.params

    def count_bits(self) -> float:
        """Returns the bits per character of the text to test on."""
        loss = jax.jit(functools.partial(cross_entropy, self.apply))
        return float(loss(self.model, self.params, test_windows()) / np.log(2))

    def measure(self) -> dict[str, float]:
        """Returns bits, megabytes of a step, and CPU-seconds of compiling."""
        compiled, seconds = self.step
        memory = compiled.memory_analysis()
        stored = jax.tree.leaves((self.params, self.state, self.model))
        return {
            "bits": self.count_bits(),
            "state": sum(leaf.nbytes for leaf in stored) / 1e6,
            "step": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6,
            "compile": seconds,
        }


# The network and its text.


def init(key: jax.Array, width: int = WIDTH) -> chex.ArrayTree:
    keys = iter(jax.random.split(key, 3 + 4 * task.LAYERS))
    alphabet = task.data()[2]
    dense = functools.partial(training.dense, gain=1.0)
    return {
        "embedding": 0.3 * jax.random.normal(next(keys), (alphabet, width)),
        "position": 0.3 * jax.random.normal(next(keys), (task.LENGTH, width)),
        "layers": [
            {
                "qkv": dense(next(keys), width, 3 * width),
                "mixed": dense(next(keys), width, width, gain=0.5 / task.LAYERS),
                "up": dense(next(keys), width, 4 * width, gain=2.0),
                "down": dense(next(keys), 4 * width, width, gain=0.5 / task.LAYERS),
                "scales": [jnp.ones(width), jnp.ones(width)],
            }
            for _ in range(task.LAYERS)
        ],
        "scale": jnp.ones(width),
        "logits": dense(next(keys), width, alphabet),
    }


def network(params: chex.ArrayTree, text: jax.Array) -> jax.Array:
    """Logits [batch, length, alphabet], as `topics_transformer.model`, at any width."""
    x = params["embedding"][text] + params["position"][: text.shape[-1]]
    for layer in params["layers"]:
        qkv = training.apply_dense(layer["qkv"], task.norm(x, layer["scales"][0]))
        heads = qkv.reshape(*qkv.shape[:-1], 3, task.HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=-3), is_causal=True)
        x = x + training.apply_dense(layer["mixed"], mixed.reshape(x.shape))
        hidden = jax.nn.relu(training.apply_dense(layer["up"], task.norm(x, layer["scales"][1])))
        x = x + training.apply_dense(layer["down"], hidden)
    return training.apply_dense(params["logits"], task.norm(x, params["scale"]))


def apply_dense(model: None, params: chex.ArrayTree, text: jax.Array) -> jax.Array:
    return network(params, text)


def apply_compact(model: Any, params: chex.ArrayTree, text: jax.Array) -> jax.Array:
    return model.apply(params, text)


def cross_entropy(
    apply: Callable[..., jax.Array], model: Any, params: chex.ArrayTree, windows: jax.Array
) -> jax.Array:
    """Nats per character of windows [batch, length + 1]."""
    return training.cross_entropy(apply(model, params, windows[:, :-1]), windows[:, 1:])


def draw(i: int, seed: int = 0) -> jax.Array:
    """Windows [batch, length + 1] of step i."""
    text = task.data()[0]
    starts = np.random.default_rng((seed, i) if seed else i).integers(
        len(text) - task.LENGTH, size=BATCH
    )
    return jnp.asarray(text[starts[:, None] + np.arange(task.LENGTH + 1)])


def test_windows() -> jax.Array:
    text = task.data()[1]
    starts = np.linspace(0, len(text) - task.LENGTH - 1, task.TEST_BATCH).astype(int)
    return jnp.asarray(text[starts[:, None] + np.arange(task.LENGTH + 1)])


# Ways to train.


def optimizer(steps: int) -> optax.GradientTransformation:
    rate = training.warmup_cosine(LEARNING_RATE, steps)
    adamw = optax.adamw(rate, weight_decay=task.WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(task.MAX_NORM), adamw)


def is_pruned(path: Any, param: chex.Array) -> bool:
    return path[0] == "layers" and path[-1] == "kernel"


def start(params: chex.ArrayTree, tx: optax.GradientTransformation, seed: int) -> Run:
    return Run(apply_dense, tx, params, tx.init(params), seed=seed)


def prune(graph: sparsity.Graph, target: float, steps: int, seed: int, **options: Any) -> Run:
    """Trains half of the steps along a ramp that ends just before."""
    first, last = steps // 10, steps // 2 - 1
    ramp = sparsity.PolynomialSchedule(max(1, (last - first) // 20), first, last)
    uniform = sparsity.Uniform(target, filter_fn=is_pruned)
    fields = {"sparsity_distribution_fn": uniform, "scheduler": ramp, **options}
    # Norms of gradients count kept entries only, as they do in a compact model.
    pruner = sparsity.MagnitudePruning(is_sparse_gradients=True, **fields)
    params = init(jax.random.key(seed))
    return start(params, pruner.wrap_optax(optimizer(steps)), seed).train(0, steps // 2)


def compacted(graph: sparsity.Graph, run: Run, steps: int, tune: bool) -> Run:
    """Returns a run of the kept values that continues a masked one."""
    masks, tx = sparsity.get_sparse_state(run.state).masks, optimizer(steps)
    # Parameters without a mask are shared, and steps donate them.
    params, state = jax.tree.map(jnp.copy, (run.params, run.state))
    model = sparsity.compact(graph, params, masks, state, tx)
    if tune:
        model = model.tune(model.params, draw(0)[:, :-1], rounds=3)
    return Run(apply_compact, tx, model.params, model.opt_state, model, run.seed)


def static(graph: sparsity.Graph, target: float, steps: int, seed: int) -> Run:
    """Returns a run of kept values from the first step."""
    pruner = sparsity.RandomPruning(
        sparsity_distribution_fn=sparsity.Uniform(target, filter_fn=is_pruned),
        sparsity_type=graph.fan_in(GROUP),
        rng_seed=8 + seed,
    )
    params, masks = pruner.instant_sparsify(init(jax.random.key(seed)))
    # Fewer inputs: larger weights keep the scale of the outputs.
    params = jax.tree.map(lambda p, m: p if m is None else p / (1 - target) ** 0.5, params, masks)
    model, tx = sparsity.compact(graph, params, masks), optimizer(steps)
    model = model.tune(model.params, draw(0)[:, :-1], rounds=3)
    return Run(apply_compact, tx, model.params, tx.init(model.params), model, seed)


def shrunk(graph: sparsity.Graph, target: float, steps: int, seed: int) -> Run:
    """Returns a run without the masked channels that continues a masked one."""
    budget = sparsity.budget(graph, macs=1 - target)
    options = {"scope": sparsity.Coupled(graph), "sparsity_distribution_fn": budget}
    run, tx = prune(graph, target, steps, seed, **options), optimizer(steps)
    masks = sparsity.get_sparse_state(run.state).masks
    small = sparsity.shrink(graph, run.params, masks, run.state)
    state = sparsity.get_sparse_state(small.opt_state).inner_state

    def apply(model: None, params: chex.ArrayTree, text: jax.Array) -> jax.Array:
        return small.apply(params, text)

    return Run(apply, tx, small.params, state, seed=seed)


def smaller(nbytes: float, steps: int, seed: int) -> Run:
    """Returns a run of a dense network whose parameters and state have about that many bytes."""

    def size(width: int) -> int:
        tree = jax.eval_shape(functools.partial(init, width=width), jax.random.key(0))
        return 12 * sum(leaf.size for leaf in jax.tree.leaves(tree))

    width = min(range(task.HEADS, WIDTH + 1, task.HEADS), key=lambda w: abs(size(w) - nbytes))
    return start(init(jax.random.key(seed), width), optimizer(steps), seed)


# Results.


def measure_all(steps: int, seeds: int, results: dict[str, Any]) -> None:
    """Measures all rows that have no result yet."""
    graph = sparsity.trace(network, jax.eval_shape(init, jax.random.key(0)), draw(0)[:, :-1])
    dense = start_dense(steps, 0)
    if "dense" not in results:
        results["dense"] = dense.train(0, steps).measure()
        save(results)
    for target in SPARSITIES:
        if str(target) not in results:
            results[str(target)] = measure_sparsity(graph, target, steps, dense)
            save(results)
    for seed in range(1, seeds):
        bits = results.setdefault("seeds", {}).setdefault(str(seed), {})
        if "dense" not in bits:
            bits["dense"] = start_dense(steps, seed).train(0, steps).count_bits()
            save(results)
        for target in SPARSITIES:
            if str(target) not in bits:
                runs = train_all(graph, target, steps, seed)
                bits[str(target)] = {name: run.count_bits() for name, run in runs.items()}
                print(seed, target, bits[str(target)], flush=True)
                save(results)


def start_dense(steps: int, seed: int) -> Run:
    return start(init(jax.random.key(seed)), optimizer(steps), seed)


def train_all(graph: sparsity.Graph, target: float, steps: int, seed: int) -> dict[str, Run]:
    """Trains the rows of a sparsity from one seed."""
    half = steps // 2
    masked = prune(graph, target, steps, seed)
    runs = {"values": compacted(graph, masked, steps, tune=False).train(half, steps)}
    runs["masked"] = masked.train(half, steps)
    fan_in = prune(graph, target, steps, seed, sparsity_type=graph.fan_in(GROUP))
    runs["grouped"] = compacted(graph, fan_in, steps, tune=True).train(half, steps)
    runs["static"] = static(graph, target, steps, seed).train(0, steps)
    runs["channels"] = shrunk(graph, target, steps, seed).train(half, steps)
    nbytes = 1e6 * runs["static"].measure()["state"]
    runs["small"] = smaller(nbytes, steps, seed).train(0, steps)
    return runs


def measure_sparsity(
    graph: sparsity.Graph, target: float, steps: int, dense: Run
) -> dict[str, dict[str, Any]]:
    """Returns the rows of a sparsity; the times of all steps are measured in turn."""
    runs = train_all(graph, target, steps, 0)
    rows: dict[str, dict[str, Any]] = {name: run.measure() for name, run in runs.items()}
    for name, row in rows.items():
        print(target, name, row, flush=True)
    programs = [functools.partial(run.advance, 0) for run in (dense, *runs.values())]
    seconds = compact_steps.time_in_turn(programs, ROUNDS)
    for name, each in zip(runs, seconds[1:], strict=True):
        rows[name]["time"] = each / seconds[0]
    rows["masked"]["dense_seconds"] = seconds[0]
    for name in ("grouped", "static"):
        formats = list(runs[name].model.formats.values())
        rows[name]["formats"] = {each: formats.count(each) for each in set(formats)}
    rows["small"]["width"] = runs["small"].params["scale"].size
    return rows


def save(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """A Markdown table of the results."""
    measured = [results[str(x)] for x in SPARSITIES if str(x) in results]
    first = min(each["masked"]["dense_seconds"] for each in measured)
    seeds = complete_seeds(results)
    dense = {**results["dense"], "time": 1.0}
    rows = [cells("", "dense", dense, [each["dense"] for each in seeds])]
    for target in map(str, sorted(SPARSITIES)):
        each = results.get(target, {})
        for name in LEGEND:
            if name in each:
                bits = [seed[target][name] for seed in seeds]
                rows.append(cells(f"{100 * float(target):.0f} %", name, each[name], bits))
    head = [
        "sparsity",
        "what trains in the second half",
        "bits",
        "state, MB",
        "step, MB",
        f"CPU time of a step (dense: {first:.2f} s)",
        "compile, CPU s",
    ]
    return report.table(head, rows)


def complete_seeds(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the bits of the seeds after the first that trained all rows."""
    seeds = results.get("seeds", {}).values()
    return [bits for bits in seeds if all(str(target) in bits for target in SPARSITIES)]


def cells(target: str, name: str, row: dict[str, Any], bits: list[float]) -> list[str]:
    """The cells of a row, from the numbers of seed 0 and the bits of other seeds."""
    text = LEGEND[name]
    if "width" in row:
        text = f"{text.partition(',')[0]} of width {row['width']}, all steps"
    metric = f"{row['bits']:.2f}"
    if bits:
        metric = report.cell({"metric": [row["bits"], *bits]})
    numbers = (metric, f"{row['state']:.1f}", f"{row['step']:.1f}")
    return [target, text, *numbers, f"{row['time']:.2f}", f"{row['compile']:.1f}"]


def page(results: dict[str, Any]) -> str:
    count = 1 + len(complete_seeds(results))
    seeds = "one seed" if count == 1 else f"{count} seeds"
    return f"""# In less memory

`python -m baselines.compact_transformer` made these results. The character transformer of
`RESULTS.md` at width {WIDTH}, trained by AdamW for {results["steps"]} steps
of {BATCH} windows of {task.LENGTH} characters, from {seeds}. The matrices of its layers
are pruned, along a ramp that ends at half of the steps. State is what a step keeps: parameters,
moments, positions and masks. Step adds the temporaries: gradients and activations. Steps of
a sparsity are measured in turn, in CPU time, as other programs ran.

{table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="write the page, train nothing")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if results.get("steps") != options.steps and not options.report:
        results = {"steps": options.steps}
    if not options.report:
        measure_all(options.steps, options.seeds, results)
    PAGE.write_text(page(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
