"""Prunes and cuts pretrained networks by several methods; writes tables of what they still do."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cut
import file_types
import jax
import jax.numpy as jnp
import numpy as np
import optax
import speech

import sparsity

Params = dict[str, jax.Array]

KINDS = {"50 %": 0.5, "70 %": 0.7, "2:4": 0.5}
METHODS: dict[str, tuple[type[sparsity.BaseUpdater], Any]] = {
    "magnitude": (sparsity.MagnitudePruning, None),
    "Wanda": (sparsity.WandaPruning, None),
    "SparseGPT": (sparsity.SparseGPTPruning, None),
    "magnitude, ADMM": (sparsity.MagnitudePruning, sparsity.ADMM()),
    "Wanda, ADMM": (sparsity.WandaPruning, sparsity.ADMM()),
}
CUT_HEADER = """| MACs | channels by | weights | accuracy | agreement | error | trained: accuracy \
| agreement | error | call, dense = 1 | seconds |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""
RATES_HEADER = """| rates by | sparsities of layers | refit | accuracy | agreement | error |
| --- | --- | --- | ---: | ---: | ---: |
"""
HEADER = """| sparsity | method | accuracy | agreement | error | first call | again |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""


class Task(NamedTuple):
    """A network with data; `data` has the functions of `speech` and of `file_types`."""

    title: str
    data: ModuleType
    batch: int
    batches: int  # to calibrate with
    tests: int
    seeds: int  # choices of inputs to calibrate with
    is_binary: bool  # outputs are log odds, not probabilities of classes
    steps: int  # of distillation
    learning_rate: float


TASKS = {
    "speech": Task("silero-vad 6.2.3, weights of PyTorch", speech, 4, 8, 32, 3, True, 600, 2e-3),
    "files": Task("magika 1.0.3, an ONNX file", file_types, 32, 18, 320, 1, False, 100, 3e-4),
}


class Scores(NamedTuple):
    """Measures on the inputs to test with."""

    accuracy: float  # share of decisions that are true
    agreement: float  # share of decisions that are those of the dense network
    error: float  # squared error of the outputs, relative to the variance of the dense ones


class Measured(NamedTuple):
    """Holds the dense network and the inputs to test with, which all methods share."""

    task: Task
    params: Params
    inputs: list[np.ndarray]
    truth: np.ndarray
    dense: np.ndarray  # outputs of the dense network

    def outputs(self, apply: cut.Apply, params: Params) -> np.ndarray:
        return np.concatenate([apply(params, x) for x in self.inputs])

    def decisions(self, outputs: np.ndarray) -> np.ndarray:
        return outputs > 0 if self.task.is_binary else outputs.argmax(1)

    def scores(self, apply: cut.Apply, params: Params) -> Scores:
        """Measures a network; `apply` is compiled."""
        outputs, dense = self.outputs(apply, params), self.dense
        decisions = self.decisions(outputs)
        error = np.mean((outputs - dense) ** 2) / dense.var(axis=0).mean()
        agreement = np.mean(decisions == self.decisions(dense))
        return Scores(float(np.mean(decisions == self.truth)), float(agreement), float(error))


def prepare(task: Task, folder: Path) -> Measured:
    """Loads a network, and compares it with onnxruntime."""
    params, path = task.data.load(folder)
    inputs, truth = task.data.record(1, task.tests, seed=0)
    batches, apply = np.split(inputs, task.tests // task.batch), jax.jit(task.data.fn)
    dense = np.concatenate([apply(params, x) for x in batches])
    check_onnx(task, dense, inputs, params, path, folder)
    return Measured(task, params, batches, truth, dense)


def check_onnx(
    task: Task, dense: np.ndarray, inputs: np.ndarray, params: Params, path: Path, folder: Path
) -> None:
    """Writes the network as ONNX; ends the program if onnxruntime finds something else in it."""
    target = folder / "dense.onnx"
    task.data.save(path, params, target)
    probabilities = 1 / (1 + np.exp(-dense)) if task.is_binary else dense
    differences = np.abs(probabilities - task.data.run_onnx(target, inputs))
    print(
        f"{task.title}: JAX and onnxruntime differ by {np.median(differences):.1e} in the median, "
        f"by at most {differences.max():.1e}"
    )
    if differences.max() > 1e-2:
        sys.exit("error: the JAX function is not the network of onnxruntime")


def is_sparse(
    graph: sparsity.Graph, task: Task, kind: str, path: tuple[str, ...], param: jax.Array
) -> bool:
    dense = task.data.DENSE + (task.data.UNEVEN if kind == "2:4" else ())
    return graph.is_weight(path, param) and path[0] not in dense


def make_pruner(graph: sparsity.Graph, task: Task, method: str, kind: str) -> sparsity.BaseUpdater:
    chosen = functools.partial(is_sparse, graph, task, kind)
    return METHODS[method][0](
        sparsity_distribution_fn=sparsity.Uniform(KINDS[kind], filter_fn=chosen),
        sparsity_type=graph.nm(2, 4) if kind == "2:4" else sparsity.Unstructured(),
    )


def mean_and_spread(values: list[float]) -> str:
    """Returns the mean in percent, and half of the range if there are several values."""
    spread = 50 * (max(values) - min(values))
    return f"{100 * np.mean(values):.1f} %" + (f" ± {spread:.1f}" if len(values) > 1 else "")


def record_batches(task: Task, seed: int) -> list[np.ndarray]:
    """Returns batches to calibrate with."""
    return np.split(task.data.record(0, task.batch * task.batches, seed)[0], task.batches)


def prune(
    measured: Measured, pruner: sparsity.BaseUpdater, batches: list[np.ndarray], refit: Any = None
) -> tuple[Params, Any]:
    """Returns the pruned parameters and the report."""
    fn, params = measured.task.data.fn, measured.params
    pruned, _, report = sparsity.oneshot(pruner, fn, params, batches, refit=refit, held=())
    return jax.block_until_ready(pruned), report


def table(measured: Measured) -> str:
    """Prunes by every method, to every kind of sparsity, once for each seed."""
    task, params = measured.task, measured.params
    calibrations = [record_batches(task, seed) for seed in range(task.seeds)]
    graph, apply = sparsity.trace(task.data.fn, params, calibrations[0][0]), jax.jit(task.data.fn)
    accuracy = measured.scores(apply, params).accuracy
    rows = [f"| — | dense | {mean_and_spread([accuracy])} | | | | |\n"]
    for kind, method in itertools.product(KINDS, METHODS):
        pruner, refit = make_pruner(graph, task, method, kind), METHODS[method][1]
        scores, seconds = [], []
        for batches in calibrations:
            started = time.process_time()
            pruned, _ = prune(measured, pruner, batches, refit)
            seconds.append(time.process_time() - started)
            check_zeros(graph, task, pruned, kind)
            scores.append(measured.scores(apply, pruned))
        cells = [mean_and_spread([*values]) for values in zip(*scores, strict=True)]
        times = [f"{seconds[0]:.1f} s", f"{seconds[-1]:.1f} s" if task.seeds > 1 else ""]
        rows.append("| " + " | ".join([kind, method, *cells, *times]) + " |\n")
        print(rows[-1], end="", flush=True)
    return HEADER + "".join(rows)


def cut_table(measured: Measured) -> str:
    """Cuts channels by every method, and trains the rest to agree with the dense network.

    New weights in the shapes that the last method leaves are trained as long.
    """
    task, params = measured.task, measured.params
    batches, rows = [x for seed in range(3) for x in record_batches(task, seed)], []
    graph, dense = sparsity.trace(task.data.fn, params, batches[0]), jax.jit(task.data.fn)
    answers = [dense(params, x) for x in batches]
    for share in cut.SHARES:
        cuts = {x: cut.cut(x, share, graph, task.data.fn, params, batches) for x in cut.METHODS}
        starts = {method: (small, small.params) for method, small in cuts.items()}
        small = cuts[cut.METHODS[-1]]
        starts["new weights"] = small, cut.draw_weights(small.params)
        for method, (small, weights) in starts.items():
            apply, started = jax.jit(small.apply), time.perf_counter()
            trained = cut.distil(
                binary_loss if task.is_binary else class_loss,
                *(small.apply, weights, batches, answers, task.steps, task.learning_rate),
            )
            seconds = time.perf_counter() - started
            networks = (dense, params), (apply, trained)
            calls = [functools.partial(fn, x, batches[0]) for fn, x in networks]
            times = sparsity.reports.time_in_turn(*calls, rounds=15)
            scores = [*measured.scores(apply, weights), *measured.scores(apply, trained)]
            macs = small.graph.macs() / graph.macs()
            cells = [
                f"{100 * macs:.0f} %",
                method,
                f"{sum(x.size for x in weights.values()) / 1e3:.0f},000",
            ]
            cells += [f"{100 * x:.1f} %" for x in scores]
            cells += [f"{times[1] / times[0]:.2f}", f"{seconds:.0f} s"]
            rows.append("| " + " | ".join(cells) + " |\n")
            print(rows[-1], end="", flush=True)
    return CUT_HEADER + "".join(rows)


def rates_table(measured: Measured) -> str:
    """Prunes by Wanda to 70 %, shared out among the layers in three ways."""
    task, params, rows = measured.task, measured.params, []
    batches = record_batches(task, 0)
    graph, apply = sparsity.trace(task.data.fn, params, batches[0]), jax.jit(task.data.fn)
    pruner, share = make_pruner(graph, task, "Wanda", "70 %"), KINDS["70 %"]
    chosen = functools.partial(is_sparse, graph, task, "70 %")
    statistics = sparsity.calibrate(task.data.fn, params, batches, "squares", chosen)
    _, report = prune(measured, pruner, batches)
    sensitivity = report.sensitivity(pruner, task.data.fn, params, batches)
    distributions = {
        "one for all": pruner.sparsity_distribution_fn,
        "`owl`": sparsity.owl(statistics, params, share),
        "`report.sensitivity`": sensitivity.distribution(params, share),
    }
    for (name, rates), refit in itertools.product(distributions.items(), ("none", "ADMM")):
        updater = dataclasses.replace(pruner, sparsity_distribution_fn=rates)
        pruned, _ = prune(measured, updater, batches, sparsity.ADMM() if refit == "ADMM" else None)
        scores = measured.scores(apply, pruned)
        each = [float(rate) for rate in rates(params).values() if rate is not None]
        cells = [name, f"{100 * min(each):.0f} to {100 * max(each):.0f} %", refit]
        cells += [f"{100 * x:.1f} %" for x in scores]
        rows.append("| " + " | ".join(cells) + " |\n")
        print(rows[-1], end="", flush=True)
    return RATES_HEADER + "".join(rows)


def binary_loss(outputs: jax.Array, answers: jax.Array) -> jax.Array:
    """Returns the cross entropy of log odds with those of the dense network."""
    return optax.sigmoid_binary_cross_entropy(outputs, jax.nn.sigmoid(answers)).mean()


def class_loss(outputs: jax.Array, answers: jax.Array) -> jax.Array:
    """Returns the cross entropy of probabilities with those of the dense network."""
    return -jnp.mean(jnp.sum(answers * jnp.log(outputs + 1e-7), axis=-1))


def check_zeros(graph: sparsity.Graph, task: Task, params: Params, kind: str) -> None:
    """Ends the program if a weight has fewer zeros than were asked for.

    SparseGPT and refits also put weights at zero whose inputs are always zero.
    """
    for name, param in params.items():
        zeros = float(np.mean(np.asarray(param) == 0))
        if is_sparse(graph, task, kind, (name,), param) and zeros < KINDS[kind] - 1e-2:
            sys.exit(f"error: {name} has {zeros:.2%} zeros at {kind}")


TABLES = {"masks": table, "rates": rates_table, "cuts": cut_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--run_dir", type=Path, default=Path("runs/pretrained"))
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    parts = []
    for name in options.networks:
        measured = prepare(TASKS[name], options.run_dir)
        tables = "\n".join(
            make(measured) for name, make in TABLES.items() if name in options.tables
        )
        parts.append(f"## {measured.task.title}\n\n{tables}")
    target = options.run_dir / "table.md"
    target.write_text("\n".join(parts), encoding="utf-8")
    print(f"The table is in {target}.")


if __name__ == "__main__":
    main()
