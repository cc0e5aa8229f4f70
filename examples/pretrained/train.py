"""Prunes pretrained networks by several methods, and writes a table of what they still do."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import file_types
import jax
import numpy as np
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


TASKS = {
    "speech": Task("silero-vad 6.2.3, weights of PyTorch", speech, 4, 8, 32, 3, True),
    "files": Task("magika 1.0.3, an ONNX file", file_types, 32, 18, 320, 1, False),
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
    outputs: Callable[[Params], np.ndarray]

    def decisions(self, outputs: np.ndarray) -> np.ndarray:
        return outputs > 0 if self.task.is_binary else outputs.argmax(1)

    def scores(self, params: Params) -> Scores:
        outputs, dense = self.outputs(params), self.outputs(self.params)
        decisions = self.decisions(outputs)
        error = np.mean((outputs - dense) ** 2) / dense.var(axis=0).mean()
        agreement = np.mean(decisions == self.decisions(dense))
        return Scores(float(np.mean(decisions == self.truth)), float(agreement), float(error))


def prepare(task: Task, folder: Path) -> Measured:
    """Loads a network, and compares it with onnxruntime."""
    params, path = task.data.load(folder)
    inputs, truth = task.data.record(1, task.tests, seed=0)
    batches, jitted = np.split(inputs, task.tests // task.batch), jax.jit(task.data.fn)

    def outputs(params: Params) -> np.ndarray:
        return np.concatenate([jitted(params, x) for x in batches])

    check_onnx(task, outputs(params), inputs, params, path, folder)
    return Measured(task, params, batches, truth, outputs)


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


def table(measured: Measured) -> str:
    """Prunes by every method, to every kind of sparsity, once for each seed."""
    task, params = measured.task, measured.params
    count = task.batch * task.batches
    calibrations = [
        np.split(task.data.record(0, count, seed)[0], task.batches) for seed in range(task.seeds)
    ]
    graph = sparsity.trace(task.data.fn, params, calibrations[0][0])
    rows = [f"| — | dense | {mean_and_spread([measured.scores(params).accuracy])} | | | | |\n"]
    for kind, method in itertools.product(KINDS, METHODS):
        pruner, refit = make_pruner(graph, task, method, kind), METHODS[method][1]
        scores, seconds = [], []
        for batches in calibrations:
            started = time.perf_counter()
            pruned, *_ = sparsity.oneshot(pruner, task.data.fn, params, batches, refit=refit)
            jax.block_until_ready(pruned)
            seconds.append(time.perf_counter() - started)
            check_zeros(graph, task, pruned, kind)
            scores.append(measured.scores(pruned))
        cells = [mean_and_spread([*values]) for values in zip(*scores, strict=True)]
        times = [f"{seconds[0]:.1f} s", f"{seconds[-1]:.1f} s" if task.seeds > 1 else ""]
        rows.append("| " + " | ".join([kind, method, *cells, *times]) + " |\n")
        print(rows[-1], end="", flush=True)
    return HEADER + "".join(rows)


def check_zeros(graph: sparsity.Graph, task: Task, params: Params, kind: str) -> None:
    """Ends the program if a weight has fewer zeros than were asked for.

    SparseGPT and refits also put weights at zero whose inputs are always zero.
    """
    for name, param in params.items():
        zeros = float(np.mean(np.asarray(param) == 0))
        if is_sparse(graph, task, kind, (name,), param) and zeros < KINDS[kind] - 1e-2:
            sys.exit(f"error: {name} has {zeros:.2%} zeros at {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--run_dir", type=Path, default=Path("runs/pretrained"))
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    parts = []
    for name in options.networks:
        measured = prepare(TASKS[name], options.run_dir)
        parts.append(f"## {measured.task.title}\n\n{table(measured)}")
    target = options.run_dir / "table.md"
    target.write_text("\n".join(parts), encoding="utf-8")
    print(f"The table is in {target}.")


if __name__ == "__main__":
    main()
