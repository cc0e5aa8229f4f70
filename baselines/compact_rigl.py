"""Trains the wide character transformer by RigL, sparse from the first step; see COMPACT_RIGL.md.

    python -m baselines.compact_rigl [--report] [--steps N] [--seeds N] [--devices N]

Text, width and recipe are those of `compact_transformer`; the layers are a scan. The masked run
wraps the optimizer. A compact run holds kept values, and moves their masks by `Compact.move` in the
steps in which the masked run moves its masks. All runs of a seed train in turn, some steps each, so
that their times compare. With several devices, of a CPU one for each core, a batch is spread over
them; a dense run on one device trains beside. Rows of a seed are stored once they are complete.
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import sparsity
from baselines import (
    compact_transformer as wide,
    report,
    store,
    topics_transformer as task,
    training,
)
from benchmarks import compact_steps

SPARSITY, EVERY, SEEDS = 0.9, 15, 2
DEPTHS = (2, 4)  # at which bytes are counted, too
ROUNDS = 6  # of measured steps and moves, those of all runs in turn
SHORT = 9  # characters of a window with almost no activations
RESULTS = store.RESULTS / "compact_rigl.json"
PAGE = store.FOLDER / "COMPACT_RIGL.md"
LEGEND = {
    "one device": "dense, one device",
    "dense": "dense",
    "masked": "rigl (masked)",
    "values": "rigl (compact)",
    "grouped": f"rigl FanIn({wide.GROUP}) (compact)",
}


# The network, its layers stacked.


def init(key: jax.Array, layers: int = task.LAYERS) -> chex.ArrayTree:
    """Returns parameters of `compact_transformer`, layers stacked, and repeated if more."""
    params = wide.init(key)
    listed = [params["layers"][i % task.LAYERS] for i in range(layers)]
    return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *listed)}


def network(params: chex.ArrayTree, text: jax.Array) -> jax.Array:
    """Logits [batch, length, alphabet], as `compact_transformer.network`."""
    x = params["embedding"][text] + params["position"][: text.shape[-1]]
    x = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])[0]
    return training.apply_dense(params["logits"], task.norm(x, params["scale"]))


def block(layer: chex.ArrayTree, x: jax.Array) -> jax.Array:
    qkv = training.apply_dense(layer["qkv"], task.norm(x, layer["scales"][0]))
    heads = qkv.reshape(*qkv.shape[:-1], 3, task.HEADS, -1)
    mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=-3), is_causal=True)
    x = x + training.apply_dense(layer["mixed"], mixed.reshape(x.shape))
    hidden = jax.nn.relu(training.apply_dense(layer["up"], task.norm(x, layer["scales"][1])))
    return x + training.apply_dense(layer["down"], hidden)


def count_stacked(path: Any, param: chex.Array) -> int:
    """Returns the number of leading axes that index layers."""
    return int(path[0] == "layers")


# Runs.

Carry = tuple[Any, chex.ArrayTree, chex.ArrayTree]  # a `Compact` or nothing, parameters, state


@dataclasses.dataclass
class Run:
    """A network in training.

    Attributes:
      carry: model, parameters and state of the optimizer.
      step: from the carry, the number of steps so far and windows to the next carry.
      move: the same with a move of the masks; `None` where `step` moves them.
      moves: whether a step moves masks.
      devices: number of devices over which a batch is spread.
      cpu: CPU-seconds of training.
      wall: seconds of training.
      compile: CPU-seconds of compiling step and move.
    """

    carry: Carry
    step: Callable[..., Carry]
    move: Callable[..., Carry] | None = None
    moves: Callable[[int], bool] = lambda i: False
    devices: int = 1
    cpu: float = 0.0
    wall: float = 0.0
    compile: list[float] = dataclasses.field(default_factory=list)

    def spread(self, devices: int) -> Run:
        """Returns the run on several devices: its carry on each, a part of the batch on each."""
        carry = jax.device_put(self.carry, NamedSharding(make_mesh(devices), PartitionSpec()))
        return dataclasses.replace(self, carry=carry, devices=devices)

    @property
    def sharding(self) -> NamedSharding | None:
        """Sharding of windows over the devices; `None` on one device."""
        if self.devices == 1:
            return None
        return NamedSharding(make_mesh(self.devices), PartitionSpec("batch"))

    def windows(self, seed: int, i: int) -> jax.Array:
        """Windows [batch, length + 1] of a step."""
        return jax.device_put(windows(seed, i), self.sharding)

    @functools.cached_property
    def programs(self) -> list[Any]:
        """The compiled step and the compiled move, which donate the carry."""
        compiled = []
        for lowered in self.lower(self.windows(0, 0)):
            start = time.process_time()
            compiled.append(lowered().compile())
            self.compile.append(time.process_time() - start)
        return compiled

    def lower(self, text: Any) -> list[Callable[[], Any]]:
        """Returns functions that lower step and move for windows of a shape."""
        functions = [self.step] if self.move is None else [self.step, self.move]
        return [
            functools.partial(jax.jit(f, donate_argnums=0).lower, self.carry, np.int32(0), text)
            for f in functions
        ]

    def train(self, seed: int, first: int, last: int) -> None:
        """Trains from one step to another, and measures the time."""
        programs, drawn = self.programs, [self.windows(seed, i) for i in range(first, last)]
        starts = time.process_time(), time.perf_counter()
        for i, text in zip(range(first, last), drawn, strict=True):
            program = programs[-1 if self.moves(i) else 0]
            self.carry = program(self.carry, np.int32(i), text)
        jax.block_until_ready(self.carry)
        self.cpu += time.process_time() - starts[0]
        self.wall += time.perf_counter() - starts[1]

    def short_windows(self) -> jax.ShapeDtypeStruct:
        """A window with almost no activations, for each device."""
        shape = (self.devices, SHORT)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.sharding)

    def count_bytes(self, text: Any = None) -> list[float]:
        """Returns megabytes of step and move, for the windows of a step or of a shape."""
        programs = self.programs if text is None else [f().compile() for f in self.lower(text)]
        memory = [each.memory_analysis() for each in programs]
        return [(x.argument_size_in_bytes + x.temp_size_in_bytes) / 1e6 for x in memory]

    def masks(self) -> chex.ArrayTree:
        model, _, state = self.carry
        return sparsity.get_sparse_state(state).masks if model is None else model.masks

    def measure(self) -> dict[str, Any]:
        """Returns bits and times."""
        model, params, _ = self.carry
        apply = network if model is None else model.apply
        text = wide.test_windows()
        loss = jax.jit(functools.partial(cross_entropy, apply))(params, text)
        return {
            "bits": float(loss / np.log(2)),
            "cpu": self.cpu,
            "wall": self.wall,
            "compile": self.compile,
        }

    def measure_bytes(self) -> dict[str, Any]:
        """Returns megabytes."""
        return {
            "state": sum(leaf.nbytes for leaf in jax.tree.leaves(self.carry)) / 1e6,
            "bytes": self.count_bytes(),
            "bytes_short": self.count_bytes(self.short_windows()),
        }

    def repeat(self, number: int) -> Carry:
        """Runs the step (0) or the move (1), to measure its time after training."""
        self.carry = self.programs[number](self.carry, np.int32(1), self.windows(0, 0))
        return self.carry


def make_mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("batch",), (AxisType.Auto,), devices=jax.devices()[:devices])


def windows(seed: int, i: int) -> jax.Array:
    """Windows [batch, length + 1] of a step, on one device."""
    return wide.draw(seed * 10**6 + i)


def make_step(
    tx: optax.GradientTransformation, model_of: Callable[[Any], Callable[..., jax.Array]]
) -> Callable[..., Carry]:
    """Returns an ordinary step.

    Args:
      tx: the optimizer.
      model_of: from the model of a carry to a function of parameters and text.
    """

    def step(carry: Carry, i: jax.Array, text: jax.Array) -> Carry:
        model, params, state = carry
        grads = jax.grad(lambda params: cross_entropy(model_of(model), params, text))(params)
        updates, state = tx.update(grads, state, params)
        return model, optax.apply_updates(params, updates), state

    return step


def cross_entropy(
    apply: Callable[..., jax.Array], params: chex.ArrayTree, text: jax.Array
) -> jax.Array:
    """Nats per character of windows [batch, length + 1]."""
    return training.cross_entropy(apply(params, text[:, :-1]), text[:, 1:])


def make_dense(seed: int, steps: int) -> Run:
    params, tx = init(jax.random.key(seed)), wide.optimizer(steps)
    return Run((None, params, tx.init(params)), make_step(tx, lambda _: network))


def make_pruner(seed: int, steps: int, **options: Any) -> sparsity.RigL:
    end = steps * 3 // 4
    return sparsity.RigL(
        sparsity_distribution_fn=sparsity.Uniform(SPARSITY, filter_fn=wide.is_pruned),
        scheduler=sparsity.PeriodicSchedule(EVERY, EVERY, end),
        drop_fraction_fn=optax.cosine_decay_schedule(training.DROP_FRACTION, end),
        batch_axes=count_stacked,
        rng_seed=seed,
        **options,
    )


def start(
    pruner: sparsity.RigL, seed: int, steps: int, layers: int = task.LAYERS
) -> tuple[Carry, chex.ArrayTree]:
    """Returns the carry of a masked run before its first step, and its masks."""
    tx, params = pruner.wrap_optax(wide.optimizer(steps)), init(jax.random.key(seed), layers)
    masks = sparsity.get_sparse_state(tx.init(params)).masks
    # Fewer inputs: larger weights keep the scale of the outputs.
    scale = (1 - SPARSITY) ** -0.5
    params = jax.tree.map(lambda p, m: p if m is None else scale * p * m, params, masks)
    return (None, params, tx.init(params)), masks


def make_masked(pruner: sparsity.RigL, seed: int, steps: int, layers: int = task.LAYERS) -> Run:
    step = make_step(pruner.wrap_optax(wide.optimizer(steps)), lambda _: network)
    return Run(start(pruner, seed, steps, layers)[0], step)


def make_compact(
    pruner: sparsity.RigL, seed: int, steps: int, tune: bool = False, layers: int = task.LAYERS
) -> Run:
    """Returns a run of kept values that starts from the masks and weights of the masked run."""
    (_, params, _), masks = start(pruner, seed, steps, layers)
    model, tx = sparsity.compact(trace(layers), params, masks), wide.optimizer(steps)
    if tune:
        model = model.tune(model.params, windows(0, 0)[:, :-1], rounds=3)

    def move(carry: Carry, i: jax.Array, text: jax.Array) -> Carry:
        model, params, state = carry
        return model.move(
            pruner, params, state, i, lambda apply, params: cross_entropy(apply, params, text)
        )

    return Run(
        (model, model.params, tx.init(model.params)),
        make_step(tx, lambda model: model.apply),
        move,
        lambda i: bool(pruner.scheduler.is_mask_update_iter(i)),
    )


@functools.cache
def trace(layers: int = task.LAYERS) -> sparsity.Graph:
    params = jax.eval_shape(lambda: init(jax.random.key(0), layers))
    return sparsity.trace(network, params, windows(0, 0)[:, :-1])


# Results.


def measure_all(seeds: int, devices: int, results: dict[str, Any]) -> None:
    """Measures all depths, and all seeds on a number of devices, that have no result yet."""
    rows = results["devices"].setdefault(str(devices), {})
    for stored, numbers, measure in (
        (results["depths"], DEPTHS, measure_depth),
        (rows, range(seeds), functools.partial(measure_seed, devices=devices)),
    ):
        for number in numbers:
            if str(number) not in stored:
                stored[str(number)] = measure(number, results["steps"])
                save(results)


def measure_seed(seed: int, steps: int, devices: int = 1) -> dict[str, dict[str, Any]]:
    """Returns the rows of a seed, whose runs train in turn."""
    pruner = make_pruner(seed, steps)
    by_groups = make_pruner(seed, steps, sparsity_type=trace().fan_in(wide.GROUP))
    runs = {
        "dense": make_dense(seed, steps),
        "masked": make_masked(pruner, seed, steps),
        "values": make_compact(pruner, seed, steps),
        "grouped": make_compact(by_groups, seed, steps, tune=True),
    }
    if devices > 1:
        runs = {name: run.spread(devices) for name, run in runs.items()}
        runs["one device"] = make_dense(seed, steps)
    for first in range(0, steps, EVERY):
        for run in runs.values():
            run.train(seed, first, min(first + EVERY, steps))
    rows = {name: run.measure() for name, run in runs.items()}
    rows["values"]["shared"] = share_entries(runs["masked"].masks(), runs["values"].masks())
    if seed > 0:
        return rows  # bytes, and times of a step, are those of seed 0
    for name, run in runs.items():
        rows[name] |= run.measure_bytes()
    formats = list(runs["grouped"].carry[0].formats.values())
    rows["grouped"]["formats"] = {each: formats.count(each) for each in set(formats)}
    places = [(name, i) for name, run in runs.items() for i in range(len(run.programs))]
    each = [functools.partial(runs[name].repeat, i) for name, i in places]
    for (name, _), seconds in zip(places, compact_steps.time_in_turn(each, ROUNDS), strict=True):
        rows[name].setdefault("seconds", []).append(seconds)
    return rows


def measure_depth(layers: int, steps: int) -> dict[str, float]:
    """Returns megabytes without activations of masked and compact training at a depth."""
    pruner = make_pruner(0, steps)
    runs = {
        "masked": make_masked(pruner, 0, steps, layers=layers),
        "values": make_compact(pruner, 0, steps, layers=layers),
    }
    return {name: max(run.count_bytes(run.short_windows())) for name, run in runs.items()}


def share_entries(masks: chex.ArrayTree, others: chex.ArrayTree) -> float:
    """Returns the part of the kept entries that other masks keep, too."""
    pairs = list(zip(jax.tree.leaves(masks), jax.tree.leaves(others), strict=True))
    kept = sum(int(mask.sum()) for mask, _ in pairs)
    return sum(int((mask & other).sum()) for mask, other in pairs) / kept


def save(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, Any], devices: int) -> str:
    """A Markdown table of the results: sizes are those of the first seed, times means of seeds."""
    seeds, rows = list(results["devices"][str(devices)].values()), []
    for name, text in LEGEND.items():
        if name not in seeds[0]:
            continue
        each, first = [rows[name] for rows in seeds], seeds[0][name]
        bits = ", ".join(f"{row['bits']:.3f}" for row in each)
        sizes = [pair(first[key], 1) for key in ("bytes", "bytes_short")]
        ratios = [
            np.mean([rows[name][key] / rows[other][key] for rows in seeds])
            for key in ("wall", "cpu")
            for other in ("dense", "masked")
        ]
        steps = pair(np.array(first["seconds"]) / seeds[0]["dense"]["seconds"][0], 2)
        times = [f"{ratio:.2f}" for ratio in ratios]
        compile_seconds = pair(first["compile"], 1)
        rows.append([text, bits, f"{first['state']:.1f}", *sizes, steps, *times, compile_seconds])
    head = [
        "training",
        "bits of each seed",
        "state, MB",
        "step; move, MB",
        "without activations, MB",
        "CPU time of a step; a move",
        "run: wall over dense",
        "over masked",
        "run: CPU over dense",
        "over masked",
        "compile, CPU s",
    ]
    return report.table(head, rows)


def pair(numbers: Any, digits: int) -> str:
    return "; ".join(f"{number:.{digits}f}" for number in numbers)


def page(results: dict[str, Any]) -> str:
    shared = " and ".join(
        f"{100 * rows['values']['shared']:.1f}" for rows in results["devices"]["1"].values()
    )
    depths = " ".join(
        f"At {layers} layers the peak of `rigl (compact)` without activations is"
        f" {sizes['values'] / sizes['masked']:.2f} of that of `rigl (masked)`."
        for layers, sizes in results["depths"].items()
    )
    moves = results["steps"] * 3 // 4 // EVERY
    numbers = [int(each) for each in results["devices"] if each != "1"]
    tables = "\n\n".join(f"{n} devices:\n\n{table(results, n)}" for n in numbers)
    return f"""# Sparse from the first step

`python -m baselines.compact_rigl` made these results. The character transformer of
`COMPACT.md`, its {task.LAYERS} layers a scan, trained for {results["steps"]} steps
of {wide.BATCH} windows by RigL at {100 * SPARSITY:.0f} %: {moves} moves of the masks,
one in {EVERY} steps until three quarters of the steps. A step that moves masks leaves the weights
as they are. Dense and masked runs have one program, compact runs one for steps and one for moves.
Bytes count arguments and temporaries; without activations, they are those of one window
of {SHORT - 1} characters. Runs of a seed train in turn, {EVERY} steps each; their times are sums
of all steps and moves, without compilation. Masked and compact run of a seed end with
{shared} % of their kept entries in common.

{table(results, 1)}

{depths}

## On several devices

XLA computes a batch of small products, which is how groups multiply, on one thread of a CPU. One
device for each core and a batch spread over a mesh of the devices keep all cores at work:
`python -m baselines.compact_rigl --devices 2`. Bytes are those of one device; ratios are to the
dense run on the same devices. The first row is a dense run on one device, which trains in turn with
the others.

{tables}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="write the page, train nothing")
    parser.add_argument("--steps", type=int, default=wide.STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--devices", type=int, default=1, help="number of devices of the CPU")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if results.get("steps") != options.steps and not options.report:
        results = {"steps": options.steps, "devices": {}, "depths": {}}
    if not options.report:
        measure_all(options.seeds, options.devices, results)
    PAGE.write_text(page(results), encoding="utf-8")
    print(table(results, options.devices))


if __name__ == "__main__":
    main()
