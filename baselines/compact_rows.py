"""Trains tasks of the baselines on kept values, and by groups of FanIn; writes COMPACT_ROWS.md.

    python -m baselines.compact_rows [--report] [--tasks NAME ...] [--rows NAME ...] [--seeds N]

Tasks, recipes and seeds are those of `baselines.run`, which has the wrapped rows of all tasks but
the wide one. A compact row is trained by the loss of its task, in place of `training.fit`: from the
masks of the wrapped updater, which `Compact.move` moves in the same steps. A result is stored as
soon as it is there; the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from baselines import digits_cnn, report, store, topics_transformer, training
from benchmarks import compact_steps

ROUNDS = 15  # of measured steps, those of all rows in turn
SIZES = {"WIDTH": 256, "BATCH": 8, "STEPS": 600, "LEARNING_RATE": 2e-3}  # of the wide transformer
RESULTS = store.RESULTS / "compact_rows.json"
PAGE = store.FOLDER / "COMPACT_ROWS.md"

Carry = tuple[Any, chex.ArrayTree, chex.ArrayTree]  # a `Compact` or nothing, parameters, state
Program = Callable[[Carry, jax.Array, jax.Array], Carry]  # from the number of a step and its key


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
      algorithm: its name in the registry.
      group: neighbouring outputs that read the same inputs, 0 for unstructured masks.
      is_compact: whether kept values train from the first step.
    """

    algorithm: str
    group: int = 0
    is_compact: bool = False


ALGORITHMS = ("no_prune", "magnitude", "static_sparse", "rigl")
ROWS = {name: Row(name) for name in ALGORITHMS}
ROWS |= {f"{name} (compact)": Row(name, 0, True) for name in ("static_sparse", "rigl")}
for size in (16, 1):
    ROWS[f"magnitude FanIn({size})"] = Row("magnitude", size)
    ROWS[f"static_sparse FanIn({size}) (compact)"] = Row("static_sparse", size, True)
    ROWS[f"rigl FanIn({size}) (compact)"] = Row("rigl", size, True)


WIDE = dataclasses.replace(
    topics_transformer.TASK,
    name="topics_wide",
    title=f"{topics_transformer.TASK.title}, {SIZES['WIDTH']} wide",
    settings={"steps": SIZES["STEPS"], "batch": SIZES["BATCH"], "width": SIZES["WIDTH"]},
)
TASKS = {
    task.name: (task, sparsities)
    for task, sparsities in (
        (digits_cnn.TASK, (0.9,)),
        (topics_transformer.TASK, (0.8,)),
        (WIDE, (0.9,)),
    )
}


# Training.


def train(task: training.Task, row: Row, target: float) -> Callable[[int], dict[str, float]]:
    """Returns a function from a seed to its metrics, which compiles once for all seeds."""
    graph, fit = trace_loss(task), training.fit
    if row.is_compact:
        fit = CompactFit(row, graph)
    elif row.group:
        fit = functools.partial(fit_groups, row, graph, fit)

    def run(seed: jax.Array) -> training.Metrics:
        key, mask_key = jax.random.split(jax.random.key(seed))
        updater = training.make_updater(row.algorithm, target, task.settings["steps"], mask_key)
        with mock.patch.object(training, "fit", fit):
            return task.train(key, updater)

    run = run if row.is_compact else jax.jit(run)
    return lambda seed: {name: float(x) for name, x in run(jnp.int32(seed)).items()}


def read_arguments(
    task: training.Task,
) -> tuple[jax.Array, chex.ArrayTree, optax.GradientTransformation, Callable[..., jax.Array]]:
    """Returns the key, parameters, optimizer and loss that a task gives to `training.fit`."""
    arguments: list[Any] = []

    def fit(
        key: jax.Array, updater: sparsity.BaseUpdater, params: chex.ArrayTree, *others: Any
    ) -> chex.ArrayTree:
        arguments.extend((key, params, *others[:2]))
        return params

    with mock.patch.object(training, "fit", fit):
        task.train(jax.random.key(0), sparsity.NoPruning())
    key, params, optimizer, loss_fn = arguments
    return key, params, optimizer, loss_fn


def trace_loss(task: training.Task) -> sparsity.Graph:
    """Returns the graph of the loss that a task gives to `training.fit`."""
    key, params, _, loss_fn = read_arguments(task)
    return sparsity.trace(loss_fn, params, key)


def fit_groups(
    row: Row,
    graph: sparsity.Graph,
    fit: Callable[..., chex.ArrayTree],
    key: jax.Array,
    updater: sparsity.BaseUpdater,
    *others: Any,
) -> chex.ArrayTree:
    """Trains as `training.fit` does, by groups of a row."""
    return fit(key, set_groups(updater, row.group, graph), *others)


def set_groups(
    updater: sparsity.BaseUpdater, group: int, graph: sparsity.Graph
) -> sparsity.BaseUpdater:
    """Returns the updater of groups, 0 for the updater as it is."""
    return dataclasses.replace(updater, sparsity_type=graph.fan_in(group)) if group else updater


@dataclasses.dataclass
class CompactFit:
    """Trains kept values in place of `training.fit`, by the same arguments.

    Attributes:
      row: the row.
      graph: graph of the loss.
      programs: compiled step and move of the first seed. RigL draws nothing in a move, so that they
        serve all seeds.
    """

    row: Row
    graph: sparsity.Graph
    programs: list[Any] | None = None

    def __call__(
        self,
        key: jax.Array,
        updater: sparsity.BaseUpdater,
        params: chex.ArrayTree,
        optimizer: optax.GradientTransformation,
        loss_fn: Callable[..., jax.Array],
        steps: int,
        *others: Any,
    ) -> chex.ArrayTree:
        updater = set_groups(updater, self.row.group, self.graph)
        carry, programs = make_compact(self.graph, updater, params, optimizer)
        self.programs = self.programs or [compile_program(x, carry, key) for x in programs]
        for i, step_key in enumerate(jax.random.split(key, steps)):
            is_move = len(programs) > 1 and bool(updater.scheduler.is_mask_update_iter(i))
            carry = self.programs[int(is_move)](carry, np.int32(i), step_key)
        model, params, _ = carry
        return model.dense(params)


def make_compact(
    graph: sparsity.Graph,
    updater: sparsity.BaseUpdater,
    params: chex.ArrayTree,
    optimizer: optax.GradientTransformation,
) -> tuple[Carry, list[Program]]:
    """Returns the start of a run of kept values, its step and, of RigL, its move."""
    masks = sparsity.get_sparse_state(updater.wrap_optax(optimizer).init(params)).masks
    model = sparsity.compact(graph, params, masks)

    def step(carry: Carry, i: jax.Array, key: jax.Array) -> Carry:
        model, params, state = carry
        grads = jax.grad(lambda params: model.apply(params, key))(params)
        updates, state = optimizer.update(grads, state, params)
        return model, optax.apply_updates(params, updates), state

    def move(carry: Carry, i: jax.Array, key: jax.Array) -> Carry:
        model, params, state = carry
        return model.move(updater, params, state, i, lambda apply, params: apply(params, key))

    moves = isinstance(updater, sparsity.RigL)
    carry = model, model.params, optimizer.init(model.params)
    return carry, [step, move] if moves else [step]


def make_masked(
    updater: sparsity.BaseUpdater,
    params: chex.ArrayTree,
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., jax.Array],
) -> tuple[Carry, list[Program]]:
    """Returns the start of a run by the wrapped optimizer, and its step."""
    tx = updater.wrap_optax(optimizer)

    def step(carry: Carry, i: jax.Array, key: jax.Array) -> Carry:
        _, params, state = carry
        grads = jax.grad(loss_fn)(params, key)
        updates, state = tx.update(grads, state, params)
        return None, optax.apply_updates(params, updates), state

    return (None, params, tx.init(params)), [step]


def compile_program(program: Program, carry: Carry, key: jax.Array) -> Any:
    """Returns the compiled program, which donates the carry."""
    return jax.jit(program, donate_argnums=0).lower(carry, np.int32(1), key).compile()


# Steps.


def measure_steps(task: training.Task, target: float) -> dict[str, dict[str, list[float]]]:
    """Returns megabytes and CPU-seconds of step and move, by row."""
    steps: dict[str, dict[str, list[float]]] = {}
    key, params, optimizer, loss_fn = read_arguments(task)
    graph, runs = sparsity.trace(loss_fn, params, key), []
    for name, row in ROWS.items():
        if row.group and not row.is_compact:
            continue  # a step after the ramp is that of a static mask
        updater = training.make_updater(row.algorithm, target, task.settings["steps"], 0)
        updater = set_groups(updater, row.group, graph)
        if row.is_compact:
            carry, programs = make_compact(graph, updater, params, optimizer)
        else:
            carry, programs = make_masked(updater, params, optimizer, loss_fn)
        steps[name] = {"bytes": [], "seconds": []}
        for program in programs:
            compiled = compile_program(program, carry, key)
            memory = compiled.memory_analysis()
            used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            steps[name]["bytes"].append(used / 1e6)
            runs.append((name, repeat(compiled, carry, key)))
    seconds = compact_steps.time_in_turn([run for _, run in runs], ROUNDS)
    for (name, _), each in zip(runs, seconds, strict=True):
        steps[name]["seconds"].append(each)
    return steps


def repeat(compiled: Any, carry: Carry, key: jax.Array) -> Callable[[], Carry]:
    """Returns a function that runs a compiled program again and again."""
    carry = jax.tree.map(jnp.copy, carry)

    def run() -> Carry:
        nonlocal carry
        carry = compiled(carry, np.int32(1), key)
        return carry

    return run


# Results.


def measure_all(
    names: list[str], labels: list[str], seeds: int | None, results: dict[str, Any]
) -> None:
    """Measures what has no result yet, one seed of all rows after the other."""
    for name, target in jobs(names):
        task = TASKS[name][0]
        sizes = SIZES if task is WIDE else {}
        with mock.patch.multiple(topics_transformer, **sizes) if sizes else nullcontext():
            measure_task(task, target, labels, seeds, results)


def measure_task(
    task: training.Task,
    target: float,
    labels: list[str],
    seeds: int | None,
    results: dict[str, Any],
) -> None:
    """Measures what has no result yet of a task at a sparsity."""
    stored = results.setdefault(f"{task.name} {target}", {"rows": {}})
    if "steps" not in stored:
        stored["steps"] = measure_steps(task, target)
        save(results)
    trained, runs = store.load(task) if task is not WIDE else {}, {}
    for label, row in ROWS.items():
        if (job := (label, 0.0 if label == "no_prune" else target)) in trained:
            metrics = {key: trained[job][key] for key in ("metric", "sparsity")}
            stored["rows"][label] = metrics
        elif label in labels:
            runs[label] = train(task, row, target)
    for seed in range(seeds or task.seeds):
        for label, run in runs.items():
            metrics = stored["rows"].setdefault(label, {"metric": [], "sparsity": []})
            if len(metrics["metric"]) > seed:
                continue
            for key, value in run(seed).items():
                metrics[key].append(value)
            print(task.name, target, label, metrics["metric"][-1], flush=True)
            save(results)


def jobs(names: list[str]) -> Iterator[tuple[str, float]]:
    return ((name, target) for name in names for target in TASKS[name][1])


def save(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(task: training.Task, stored: dict[str, Any]) -> str:
    """A Markdown table of a task at a sparsity."""
    dense, rows = stored["steps"]["no_prune"]["seconds"][0], []
    for label in ROWS:
        metrics = stored["rows"].get(label, {"metric": []})
        alike = label.replace("magnitude", "static_sparse") + " (compact)"
        steps = stored["steps"].get(label) or stored["steps"][alike]
        seeds = len(metrics["metric"])
        if not seeds:
            continue
        metric = report.cell(metrics) if seeds > 1 else f"{metrics['metric'][0]:.4g}"
        times = join([each / dense for each in steps["seconds"]], 2)
        rows.append([f"`{label}`", metric, f"{seeds}", join(steps["bytes"], 1), times])
    head = ["training", task.metric, "seeds", "step; move, MB", "CPU time over a dense step"]
    return report.table(head, rows)


def join(numbers: list[float], digits: int) -> str:
    return "; ".join(f"{number:.{digits}f}" for number in numbers)


def page(results: dict[str, Any]) -> str:
    sections = [
        f"## {TASKS[name][0].title}, {target:.0%}\n\n"
        f"{table(TASKS[name][0], results[f'{name} {target}'])}\n"
        for name, target in jobs(list(TASKS))
        if f"{name} {target}" in results
    ]
    sizes = ", ".join(f"{key.lower().replace('_', ' ')} {x:g}" for key, x in SIZES.items())
    return f"""# On kept values, and by groups

`python -m baselines.compact_rows` made these results. Tasks, recipes and seeds are those of
`RESULTS.md`, which has the wrapped rows. The wide transformer differs by
{sizes}.
Rows named compact train kept values from the first step. They start from the masks of the wrapped
updater, which move in the same steps. Magnitude by groups trains with masks, as its ramp changes
the number of kept values; its step is that of kept values after the ramp. Megabytes are those of
arguments and temporaries of a compiled step, activations included. Steps of a table are measured
in turn. A wrapped step of RigL moves masks in the same program.

{chr(10).join(sections)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="write the page, train nothing")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--seeds", type=int, help="of compact rows and groups; as the task has")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not options.report:
        measure_all(options.tasks, options.rows, options.seeds, results)
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
