"""Bytes of sparse deltas beside plain compression, and the time of making and applying them.

Changed entries lie at random places; the changes are 5 % of the spread of the weights.

    python -m benchmarks.deltas [--quick] [--write]

--write replaces the section of this benchmark in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
import zstandard

from benchmarks import results
from sparsity import Delta

HEADING = "## Sparse deltas"
DENSITIES = (0.001, 0.01, 0.1)


def make_weights(size: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 weights before and after training, [size]."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, size).astype(np.float32)
    tuned = base.copy()
    changed = np.sort(rng.choice(size, int(density * size), replace=False, shuffle=False))
    tuned[changed] += rng.normal(0, 0.001, changed.size).astype(np.float32)
    return base, tuned


def compress(*arrays: np.ndarray) -> int:
    """Returns the bytes of arrays under zstd, level 3."""
    compressor = zstandard.ZstdCompressor().compressobj()
    sizes = [len(compressor.compress(array.view(np.uint8).data)) for array in arrays]
    return sum(sizes) + len(compressor.flush())


def measure_bytes(size: int, density: float, folder: Path) -> list[str]:
    """Returns a row: bytes of a changed value as each kind of file."""
    base, tuned = make_weights(size, density)
    count = int(np.sum(tuned != base))
    path = folder / "delta.safetensors"
    files = []
    for dtype in (None, "bfloat16"):
        Delta.between({"w": base}, {"w": tuned}, dtype=dtype).save(path)
        files += [path.stat().st_size, compress(np.fromfile(path, np.uint8))]
    plain = [compress(tuned), compress(tuned - base)]
    plain.append(compress(tuned.view(np.uint32) ^ base.view(np.uint32)))
    numbers = [tuned.nbytes, *plain, *files]
    return [f"{density:.1%}", f"{count:,}", *(f"{number / count:.2f}" for number in numbers)]


def measure_times(size: int, density: float, rounds: int, folder: Path) -> list[list[str]]:
    """Returns a row for each step: CPU seconds, and the ratio to saving all weights."""
    base, tuned = make_weights(size, density)
    mask = (tuned != base).astype(np.uint8)
    delta, path = Delta.between({"w": base}, {"w": tuned}), folder / "delta.safetensors"
    runs: dict[str, Callable[[], object]] = {
        "save all weights": lambda: safetensors.numpy.save_file({"w": tuned}, folder / "all"),
        "load all weights": lambda: safetensors.numpy.load_file(folder / "all"),
        "Delta.between": lambda: Delta.between({"w": base}, {"w": tuned}),
        "Delta.between, with masks": lambda: Delta.between({"w": base}, {"w": tuned}, {"w": mask}),
        "save": lambda: delta.save(path),
        "load": lambda: Delta.load(path),
        "apply": lambda: delta.apply({"w": base}),
        "apply, two deltas merged": lambda: Delta.merge([delta, delta]).apply({"w": base}),
    }
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    unit = next(iter(best.values()))
    return [[name, f"{seconds:.2f}", f"{seconds / unit:.2f}"] for name, seconds in best.items()]


def report(size: int, sizes: list[list[str]], times: list[list[str]]) -> str:
    """Returns the section of RESULTS.md."""
    columns = [
        *("density", "changed values", "all weights", "all, zstd", "difference, zstd"),
        *("XOR, zstd", "delta", "delta, zstd", "bfloat16 delta", "bfloat16 delta, zstd"),
    ]
    return (
        f"{HEADING}\n\n{results.measured_on()} {size:,} float32 weights. Bytes of a file for each "
        "changed value; a million values at 1 % are as many megabytes. The plain difference is not "
        "exact, XOR of the bits and the delta are; zstd has level 3.\n\n"
        f"{results.table(columns, sizes)}\n\nTimes at 1 %: best CPU time of runs in turn, "
        "digests of all weights included.\n\n"
        f"{results.table(['step', 'CPU seconds', 'of saving all'], times)}"
    )


def main() -> None:
    options = results.Parser(__doc__, "few weights").read()
    size = 1_000_000 if options.quick else 100_000_000
    with tempfile.TemporaryDirectory() as folder:
        sizes = [measure_bytes(size, density, Path(folder)) for density in DENSITIES]
        times = measure_times(size, 0.01, 2 if options.quick else 3, Path(folder))
    text = report(size, sizes, times)
    print(text)
    if options.write:
        results.write_section(text)


if __name__ == "__main__":
    main()
