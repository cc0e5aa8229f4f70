"""Prunes magika's network, which tells the types of files, by files of this machine."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import files
import jax
import magika
import numpy as np
import onnx_model
import onnxruntime
import rich.box
import rich.console
import rich.progress
import rich.table
import zstandard

import sparsity
from sparsity.calibration import prune, relative_error

NETWORK = files.MODEL / "model.onnx"
BATCH = 32  # files
DENSE = ("MatMul_9",)  # looks bytes up, by a product with one-hot rows
KINDS = {"50 %": 0.5, "70 %": 0.7, "2:4": 0.5}
METHODS: dict[str, tuple[type[sparsity.BaseUpdater], Any]] = {
    "magnitude": (sparsity.MagnitudePruning, None),
    "Wanda": (sparsity.WandaPruning, None),
    "Wanda, least squares": (sparsity.WandaPruning, sparsity.LeastSquares()),
    "Wanda, ADMM": (sparsity.WandaPruning, sparsity.ADMM()),
    "SparseGPT": (sparsity.SparseGPTPruning, None),
}
BEST = ("70 %", "Wanda, ADMM")  # is written to a file

Predict = Callable[[onnx_model.Params], np.ndarray]  # of all test files, [files, types]


class Row(NamedTuple):
    """A pruned network."""

    kind: str
    method: str
    params: onnx_model.Params
    seconds: float


def load_files(most: int) -> tuple[list[Path], list[Path]]:
    """Files to calibrate with, of which there are more, and to test with: whole batches."""
    calibration, test = (
        part[: len(part) // BATCH * BATCH] for part in files.collect(2 * most, most)
    )
    if not test or not calibration:
        sys.exit("error: this machine has too few files whose extensions tell their types")
    return calibration, test


def in_batches(paths: list[Path]) -> list[np.ndarray]:
    return np.split(np.stack([files.features(path) for path in paths]), len(paths) // BATCH)


def check_reader(dense: np.ndarray, paths: list[Path], inputs: list[np.ndarray]) -> None:
    """Compares the outputs of the JAX function with those of onnxruntime, and with magika's."""
    differences = np.max(np.abs(dense - run_onnx(NETWORK, inputs)), axis=1)
    fills = ~np.any(np.concatenate(inputs) == files.CONFIG["padding_token"], axis=1)
    print(
        f"JAX and onnxruntime differ by at most {differences[fills].max():.1e} in the "
        f"{fills.sum()} files that fill the input, {differences.max():.1e} in all, "
        f"{np.median(differences):.1e} in the median"
    )
    predictions = [files.LABELS[i] for i in dense.argmax(1)]
    published = [
        str(result.prediction.dl.label) for result in magika.Magika().identify_paths(paths)
    ]
    same = np.mean(np.array(predictions) == np.array(published))
    print(f"the types are magika's in {same:.1%} of the files")
    if same < 0.99 or np.median(differences) > 1e-6:
        sys.exit("error: the JAX function is not magika's network")


def run_onnx(path: Path, inputs: list[np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    (source,) = session.get_inputs()
    return np.concatenate([session.run(None, {source.name: batch})[0] for batch in inputs])


def is_sparse(graph: sparsity.Graph, path: tuple[str, ...], param: jax.Array) -> bool:
    return graph.is_weight(path, param) and path != DENSE


def make_pruner(graph: sparsity.Graph, method: str, kind: str) -> sparsity.BaseUpdater:
    chosen = functools.partial(is_sparse, graph)
    return METHODS[method][0](
        sparsity_distribution_fn=sparsity.Uniform(KINDS[kind], filter_fn=chosen),
        sparsity_type=graph.nm(2, 4) if kind == "2:4" else sparsity.Unstructured(),
    )


def sizes(params: onnx_model.Params) -> tuple[int, int]:
    """Bytes of all parameters: as non-zeros and a bit for each entry, and compressed by zstd."""
    arrays = [np.asarray(param) for param in params.values()]
    bitmask = sum(-(-array.size // 8) + 4 * np.count_nonzero(array) for array in arrays)
    compress = zstandard.ZstdCompressor().compress
    return bitmask, sum(len(compress(array.tobytes())) for array in arrays)


def check_masks(graph: sparsity.Graph, params: onnx_model.Params, kind: str) -> None:
    """Ends the program if the zeros are not where, or not as many as, was asked for."""
    for name, param in params.items():
        if not is_sparse(graph, (name,), param):
            continue
        zeros = np.asarray(param) == 0
        if abs(np.mean(zeros) - KINDS[kind]) > 1e-3:
            sys.exit(f"error: {name} has {np.mean(zeros):.2%} zeros at {kind}")
        if kind == "2:4":
            groups = np.moveaxis(zeros, graph.nm(2, 4)((name,), param).axis, -1).reshape(-1, 4)
            if groups.sum(axis=1).min() < 2:
                sys.exit(f"error: {name} is not 2:4")


def print_table(rows: list[Row], predict: Predict, truth: np.ndarray, statistics: Any) -> None:
    """Shows what each network does on the test files, and what its layers have lost.

    Args:
      rows: the dense network first.
      predict: the outputs of a network.
      truth: the numbers of the files' types.
      statistics: of the inputs of the layers that are pruned.
    """
    shown = rich.table.Table("sparsity", "method", box=rich.box.SIMPLE)
    layers = [path[0] for path in statistics]
    for column in ("agreement", "accuracy", "error", *layers, "bitmask", "zstd", "seconds"):
        shown.add_column(column, justify="right")
    params = rows[0].params
    dense = predict(params)
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.kind != row.kind:
            shown.add_section()
        outputs = predict(row.params)
        lost = [
            float(relative_error(seen, params[path[0]], row.params[path[0]]))
            for path, seen in statistics.items()
        ]
        shown.add_row(
            row.kind,
            row.method,
            f"{np.mean(outputs.argmax(1) == dense.argmax(1)):.1%}",
            f"{np.mean(outputs.argmax(1) == truth):.1%}",
            f"{np.sum((outputs - dense) ** 2) / np.sum(dense**2):.2%}",
            *(f"{abs(error):.2%}" for error in lost),
            *(f"{size / 1e6:.2f} MB" for size in sizes(row.params)),
            f"{row.seconds:.1f}",
        )
    rich.console.Console(width=124).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=9, help="test files of each type")
    parser.add_argument("--run_dir", type=Path, default=Path("runs/oneshot"))
    options = parser.parse_args()
    calibration, test = load_files(options.most)
    fn, params = onnx_model.load(NETWORK)
    batches, inputs, jitted = in_batches(calibration), in_batches(test), jax.jit(fn)

    def predict(params: onnx_model.Params) -> np.ndarray:
        return np.concatenate([jitted(params, batch) for batch in inputs])

    truth = np.array([files.truth(path) for path in test])
    types = len({*truth})
    print(f"{len(calibration)} files to calibrate, {len(test)} of {types} types to test")
    check_reader(predict(params), test, inputs)

    graph = sparsity.trace(fn, params, batches[0])
    chosen = rich.progress.track(batches, "calibrating")
    statistics = sparsity.calibrate(fn, params, chosen, "gram", lambda path, _: path != DENSE)
    rows = [Row("", "dense", params, 0.0)]
    for kind, method in rich.progress.track([*itertools.product(KINDS, METHODS)], "pruning"):
        started = time.perf_counter()
        pruner, refit = make_pruner(graph, method, kind), METHODS[method][1]
        pruned, _ = jax.block_until_ready(prune(pruner, params, statistics, refit))
        rows.append(Row(kind, method, pruned, time.perf_counter() - started))

    # Layer by layer, each with the inputs that the pruned layers before it give.
    kind, method = BEST
    started = time.perf_counter()
    pruner, refit = make_pruner(graph, method, kind), METHODS[method][1]
    pruned, _, report = sparsity.oneshot(pruner, fn, params, batches, refit)
    rows.append(Row(kind, f"{method}, in order", pruned, time.perf_counter() - started))
    for row in rows[1:]:
        check_masks(graph, row.params, row.kind)
    print_table(rows, predict, truth, statistics)
    print(report.table())

    options.run_dir.mkdir(parents=True, exist_ok=True)
    report.plot().figure.savefig(options.run_dir / "errors.png", dpi=150, bbox_inches="tight")
    target = options.run_dir / "model.onnx"
    onnx_model.save(NETWORK, pruned, target)
    labels = predict(pruned).argmax(1)
    same = np.mean(run_onnx(target, inputs).argmax(1) == labels)
    print(f"{target}: onnxruntime finds the types that JAX finds in {same:.1%} of the test files")
    if same < 0.99 or np.mean(labels == predict(params).argmax(1)) < 0.9:
        sys.exit("error: too many files change their type")


if __name__ == "__main__":
    main()
