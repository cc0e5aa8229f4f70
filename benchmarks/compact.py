"""Memory, time and compilation of training steps on kept values, against dense and masked steps.

Layers of one size, scanned and unrolled, and a transformer of scanned blocks; adam, donated. Memory
is what the compiled step needs for arguments and temporaries. Steps are measured in turn in one
process, and compiled in turn; the figures are medians of the ratio in a round. `tune` chooses the
format of a layer on a grid of sparsities, rows and groups of outputs. The peak of `compact` itself
is measured in a process of its own.

    python -m benchmarks.compact [--quick] [--parts steps tune peak] [--write]

--write replaces the sections of these parts in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sparsity
from benchmarks import results

Params: TypeAlias = dict[str, Any]

HEADINGS = {
    "steps": "## Compact models",
    "tune": "## Compact models, tuned",
    "peak": "## Compact models, the peak of compact",
}
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
ROWS = (1, 16, 128, 512)
GROUPS = (1, 4, 16, 64)


class Network(NamedTuple):
    """A model to train.

    Attributes:
      fn: a function of parameters and inputs.
      params: the dense parameters.
      x: the inputs.
      is_stack: whether the first axis of a parameter, with this path, indexes layers.
    """

    fn: Callable[..., jax.Array]
    params: Params
    x: jax.Array
    is_stack: Callable[[Any, jax.Array], int]


class Program(NamedTuple):
    """A training step, `step(state, inputs)`, and its arguments."""

    step: Callable[..., Any]
    state: Any
    inputs: Any


class Case(NamedTuple):
    """A row of programs: a network, its sparsities, and numbers of measurements."""

    name: str
    rows: int
    make: Callable[[], Network]
    sparsities: tuple[float, ...]
    rounds: int
    compilations: int


def main() -> None:
    parser = results.Parser(__doc__, "small models, few rounds")
    parser.add_argument("--parts", nargs="+", default=list(HEADINGS), choices=HEADINGS)
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.read()
    if options.one:
        print(json.dumps(measure_peak(*options.one)))
        return
    measures = {"steps": report_steps, "tune": report_tune, "peak": report_peak}
    for part in options.parts:
        text = measures[part](options.quick)
        print(f"\n{text}\n", flush=True)
        if options.write:
            results.write_section(text)


def layers(count: int, size: int, rows: int, is_scanned: bool) -> Network:
    """Layers of size x size, in a scan or one after the other."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.relu(h @ w) + h, None

    def fn(params: Params, x: jax.Array) -> jax.Array:
        if is_scanned:
            return lax.scan(layer, x, params["layers"])[0]
        for index in range(count):
            x, _ = layer(x, params[f"{index}"])
        return x

    keys = jax.random.split(jax.random.key(0), count)
    draw = jax.jit(functools.partial(jax.random.normal, shape=(size, size)))
    weights = {f"{index}": draw(key) / size for index, key in enumerate(keys)}
    params = {"layers": jnp.stack(list(weights.values()))} if is_scanned else weights
    return Network(fn, params, jnp.ones((rows, size)), lambda _, w: w.ndim - 2)


def transformer(blocks: int, width: int, tokens: int) -> Network:
    """Scanned blocks of attention, MLP and norms, with a tied embedding of 512 symbols."""
    shapes = {"qkv": (3 * width,), "out": (width,), "up": (4 * width,), "down": (width,)}
    heads = width // 64 or 1

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * scale * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    def block(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        qkv = jnp.split(norm(x, w["norm1"]) @ w["qkv"], 3, axis=-1)
        q, k, v = (each.reshape(len(x), heads, -1) for each in qkv)
        scores = jnp.einsum("thd,shd->hts", q, k) / math.sqrt(width / heads)
        attended = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)
        x = x + attended.reshape(len(x), width) @ w["out"]
        return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"], None

    def fn(params: Params, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(block, params["embedding"][x], params["blocks"])
        return norm(h, params["norm"]) @ params["embedding"].T

    key = jax.random.key(0)
    stacks = {"norm1": jnp.ones((blocks, width)), "norm2": jnp.ones((blocks, width))}
    for name, outputs in shapes.items():
        inputs = 4 * width if name == "down" else width
        stacks[name] = jax.random.normal(key, (blocks, inputs, *outputs)) / math.sqrt(inputs)
    params = {
        "embedding": jax.random.normal(key, (512, width)),
        "blocks": stacks,
        "norm": jnp.ones(width),
    }
    x = jax.random.randint(key, (tokens,), 0, 512)
    return Network(fn, params, x, lambda path, _: int("blocks" in jax.tree_util.keystr(path)))


def make_programs(network: Network, sparsities: Sequence[float]) -> dict[str, Program]:
    """Returns training steps: dense, masked at the first sparsity, compact at each."""
    adam, programs = optax.adam(1e-3), dict[str, Program]()
    graph = sparsity.trace(network.fn, network.params, network.x)

    def train(
        apply: Callable[..., jax.Array], params: Params, state: Any, tx: Any, x: jax.Array
    ) -> tuple[Params, Any]:
        grads = jax.grad(lambda params: jnp.mean(apply(params, x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step_dense(state: Any, x: jax.Array) -> Any:
        return train(network.fn, *state, adam, x)

    def step_masked(
        pruner: sparsity.BaseUpdater, tx: optax.GradientTransformation, state: Any, x: jax.Array
    ) -> Any:
        params, opt_state = train(network.fn, *state, tx, x)
        return pruner.post_gradient_update(params, opt_state), opt_state

    def step_compact(state: Any, inputs: Any) -> Any:
        model, x = inputs
        return train(model.apply, *state, adam, x)

    # Each program donates a state of its own.
    params = jax.tree.map(jnp.copy, network.params)
    programs["dense"] = Program(step_dense, (params, adam.init(params)), network.x)
    for target in sparsities:
        pruner = sparsity.StaticRandomSparse(
            sparsity_distribution_fn=sparsity.Uniform(target), batch_axes=network.is_stack
        )
        tx = pruner.wrap_optax(adam)
        opt_state = tx.init(network.params)
        masks = opt_state.masks
        if len(programs) == 1:
            step = functools.partial(step_masked, pruner, tx)
            params = jax.tree.map(jnp.copy, network.params)
            programs["masked"] = Program(step, (params, opt_state), network.x)
        model = sparsity.compact(graph, network.params, masks)
        inputs = model, network.x
        values = jax.tree.map(jnp.copy, model.params)
        name = f"compact, {100 * target:.0f} %"
        programs[name] = Program(step_compact, (values, adam.init(values)), inputs)
    return programs


def measure(case: Case) -> list[list[str]]:
    """Returns rows: bytes for each dense weight, ratios of steps, and of compilations."""
    network = case.make()
    weights = sum(leaf.size for leaf in jax.tree.leaves(network.params))
    programs = make_programs(network, case.sparsities)
    compiled, spent = compile_in_turn(programs, case.compilations)
    memory = {name: each.memory_analysis() for name, each in compiled.items()}
    nbytes = {x: m.argument_size_in_bytes + m.temp_size_in_bytes for x, m in memory.items()}
    seconds, used = run_in_turn(programs, compiled, case.rounds)
    return [
        [
            case.name,
            f"{case.rows}",
            name,
            f"{nbytes[name] / weights:.2f}",
            f"{ratio_in_turn(seconds[name], seconds['dense']):.2f}",
            f"{ratio_in_turn(used[name], used['dense']):.2f}",
            f"{1000 * statistics.median(seconds[name]):.0f}",
            f"{ratio_in_turn(spent[name], spent['masked']):.2f}",
            f"{statistics.median(spent[name]):.2f}",
        ]
        for name in programs
    ]


def ratio_in_turn(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def compile_in_turn(
    programs: dict[str, Program], rounds: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns the compiled steps, and the CPU-seconds of tracing, lowering and compiling."""
    compiled, spent = dict[str, Any](), {name: list[float]() for name in programs}
    jax.jit(jnp.sin).lower(1.0).compile()  # what starts with the first program
    for _, (name, program) in itertools.product(range(rounds), programs.items()):
        jax.clear_caches()
        start = time.process_time()
        step = jax.jit(program.step, donate_argnums=0)
        compiled[name] = step.lower(program.state, program.inputs).compile()
        spent[name].append(time.process_time() - start)
    return compiled, spent


def run_in_turn(
    programs: dict[str, Program], compiled: dict[str, Any], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns seconds and CPU-seconds of each step, in turn, after one step that warms up."""
    states = {name: program.state for name, program in programs.items()}
    seconds, used = ({name: list[float]() for name in programs} for _ in range(2))
    for round_index in range(rounds + 1):
        for name, program in programs.items():
            jax.block_until_ready(states)
            start, start_used = time.perf_counter(), time.process_time()
            states[name] = jax.block_until_ready(compiled[name](states[name], program.inputs))
            if round_index:
                seconds[name].append(time.perf_counter() - start)
                used[name].append(time.process_time() - start_used)
    return seconds, used


def report_steps(quick: bool) -> str:
    """Measures training steps, and returns their section."""
    size, few, many, blocks, width = (64, 4, 8, 2, 64) if quick else (2048, 128, 2048, 12, 512)
    rounds, compilations = (1, 1) if quick else (5, 3)
    cases = []
    for is_scanned, rows in itertools.product((True, False), (few, many)):
        name = f"8 {'scanned' if is_scanned else 'unrolled'} layers"
        make = functools.partial(layers, 8, size, rows, is_scanned)
        at, count = ((0.9, 0.95), rounds) if rows == few else ((0.9,), -(-rounds // 2))
        cases.append(Case(name, rows, make, at, count, compilations))
    make = functools.partial(layers, 8 if quick else 48, size // 8, few, False)
    cases.append(Case("48 small unrolled layers", few, make, (0.9,), 3 * rounds, compilations))
    for tokens in (16, 512):
        make = functools.partial(transformer, blocks, width, tokens)
        count = 3 * rounds if tokens < few else rounds
        cases.append(Case("transformer", tokens, make, (0.9,), count, compilations))
    table = []
    for case in cases:
        table += measure(case)
        print(*("\t".join(row) for row in table[-len(case.sparsities) - 2 :]), sep="\n", flush=True)
    head = ["network", "rows", "step", "B a weight", "step / dense", "in CPU time", "step, ms"]
    head += ["compile / masked", "compile, CPU s"]
    return (
        f"{HEADINGS['steps']}\n\n{results.measured_on()} Layers of {size} x {size}, small ones of "
        f"{size // 8} x {size // 8}, and a transformer of {blocks} scanned blocks of width {width} "
        "with a tied embedding; float32, adam, donated. `masked` is StaticRandomSparse at 90 %. "
        "Bytes of arguments and temporaries of the compiled step for each dense weight. Steps and "
        "compilations (tracing and lowering included) are measured in turn: medians of the ratio "
        "in a round.\n\n"
        f"{results.table(head, table)}"
    )


def report_tune(quick: bool) -> str:
    """Measures tuned layers, and returns their section."""
    size, rounds = (64, 1) if quick else (2048, 10)
    table = []
    for target, rows in itertools.product(SPARSITIES, ROWS[:2] if quick else ROWS):
        cells = []
        for group in GROUPS:
            product, step, name = measure_tuned(size, rows, target, group, rounds)
            cells.append(f"{product:.2f}, {step:.2f} {name}")
        table.append([f"{100 * target:.0f} %", f"{rows}", *cells])
        print(*table[-1], sep="\t", flush=True)
    return (
        f"{HEADINGS['tune']}\n\n{results.measured_on()} A layer of {size} x {size}, float32, with "
        "masks of FanIn(group), in the format that `tune` chooses. The first figure is the time of "
        "the product with the gradients of its kept values and inputs, over the time with the "
        "dense layer; the second one is of a donated step of adam with these gradients. Dense and "
        "tuned programs are measured in turn: medians of the ratio in a round.\n\n"
        f"{results.table(['sparsity', 'rows', *(f'group {x}' for x in GROUPS)], table)}"
    )


def measure_tuned(
    size: int, rows: int, target: float, group: int, rounds: int
) -> tuple[float, float, str]:
    """Returns times of the tuned format over those of dense, of product and step; the format."""
    params = {"w": jax.random.normal(jax.random.key(0), (size, size))}
    x, dy = jax.random.normal(jax.random.key(1), (2, rows, size))

    def fn(params: Params, x: jax.Array) -> jax.Array:
        return x @ params["w"]

    mask = draw_mask(np.random.default_rng(0), size, target, group)
    params, masks = {"w": params["w"] * mask}, {"w": mask}
    model = sparsity.compact(sparsity.trace(fn, params, x), params, masks)
    model = model.tune(model.params, x, rounds=rounds)
    dense = make_runs(lambda _, params, x: fn(params, x), None, params, x, dy)
    tuned = make_runs(lambda m, params, x: m.apply(params, x), model, model.params, x, dy)
    ratios = [compare(*pair, rounds) for pair in zip(tuned, dense, strict=True)]
    return ratios[0], ratios[1], model.formats[("w",)]


def make_runs(
    apply: Callable[..., jax.Array], model: Any, params: Params, x: jax.Array, dy: jax.Array
) -> list[Callable[[], Any]]:
    """Returns compiled runs: a product with its gradients, and a donated step of adam with them."""
    adam = optax.adam(1e-3)

    def both(model: Any, params: Params, x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(functools.partial(apply, model), params, x)
        return y, pull(dy)

    def step(carry: Any, model: Any, x: jax.Array, dy: jax.Array) -> Any:
        params, state = carry
        y, (grads, dx) = both(model, params, x, dy)
        updates, state = adam.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (y, dx)

    product, train = jax.jit(both), jax.jit(step, donate_argnums=0)
    copy = jax.tree.map(jnp.copy, params)
    carry = copy, adam.init(copy)

    def run_step() -> Any:
        nonlocal carry
        carry, outputs = train(carry, model, x, dy)
        return carry, outputs

    return [lambda: product(model, params, x, dy), run_step]


def compare(some: Callable[[], Any], other: Callable[[], Any], rounds: int) -> float:
    """Returns the median ratio of the times of two runs in the same round."""
    seconds: list[list[float]] = [[], []]
    for _, (times, run) in itertools.product(
        range(rounds), zip(seconds, (some, other), strict=True)
    ):
        jax.block_until_ready(run())  # wakes threads and caches after a rival
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return ratio_in_turn(*seconds)


def draw_mask(rng: np.random.Generator, size: int, target: float, group: int) -> np.ndarray:
    """Returns a random mask of FanIn(group), or of single entries if `group` is 0."""
    if group == 0:
        flat = np.arange(size * size) < round(size * size * (1 - target))
        return rng.permutation(flat).reshape(size, size).astype(np.uint8)
    kept = np.arange(size) < round(size * (1 - target))
    units = rng.permuted(np.tile(kept[:, None], (1, size // group)), axis=0)
    return np.repeat(units, group, axis=1).astype(np.uint8)


def report_peak(quick: bool) -> str:
    """Measures `compact` in processes of their own, and returns their section."""
    cases = [(2, 128, 0)] if quick else [(8, 2048, 0), (32, 1024, 0), (8, 2048, 16)]
    table = []
    for case in cases:
        command = [sys.executable, "-m", "benchmarks.compact", "--one", *map(str, case)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        count, size, group = case
        name = f"{count} of {size} x {size}{f', groups of {group}' if group else ''}"
        table.append([name, *(f"{x / 2**20:.1f}" for x in figures)])
        print(*table[-1], sep="\t", flush=True)
    head = ["parameters", "params, MiB", "masks", "result", "one parameter", "peak above params"]
    return (
        f"{HEADINGS['peak']}\n\n{results.measured_on()} The memory of a process while "
        "`sparsity.compact` runs, sampled each millisecond, above what the process holds before, "
        "which is params and masks. The result is kept values and their positions.\n\n"
        f"{results.table(head, table)}"
    )


def measure_peak(count: int, size: int, group: int) -> list[int]:
    """Returns bytes: params, masks, the result, one parameter, and the peak of `compact`.

    Args:
      count: number of parameters.
      size: inputs and outputs of each.
      group: outputs that share inputs; 0 draws every entry alone.
    """

    def fn(params: Params, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = x @ w
        return x

    def draw(size: int) -> tuple[Params, Params]:
        weights = {f"{i}": jnp.ones((size, size)) for i in range(count)}
        drawn = {name: jnp.asarray(draw_mask(rng, size, 0.9, group)) for name in weights}
        return weights, drawn

    def run(size: int) -> list[int]:
        params, masks = draw(size)
        graph = sparsity.trace(fn, params, jnp.ones((1, size)))
        model, peak = sample_peak(lambda: sparsity.compact(graph, params, masks))
        sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (params, masks)]
        result = sum(x.nbytes for x in jax.tree.leaves((model, model.params)))
        return [*sizes, result, params["0"].nbytes, peak]

    rng = np.random.default_rng(0)
    run(16)  # starts what the first call starts
    return run(size)


def sample_peak(run: Callable[[], Any]) -> tuple[Any, int]:
    """Returns a result, and the largest growth of the memory of this process meanwhile."""
    done, sizes = threading.Event(), list[int]()

    def sample() -> None:
        while not done.is_set():
            sizes.append(_resident_bytes())
            time.sleep(0.001)

    start = _resident_bytes()
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = jax.block_until_ready(run())
    finally:
        done.set()
        sampler.join()
    return result, max(sizes) - start


def _resident_bytes() -> int:
    """Returns the resident memory of this process, on Linux."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
