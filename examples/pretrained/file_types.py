"""magika, which tells types of files: an ONNX network, read as the example `oneshot` reads it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "oneshot"))

import files
import onnx_model
import onnxruntime

NETWORK = files.MODEL / "model.onnx"
DENSE = ("MatMul_9",)  # looks bytes up, by a product with one-hot rows
UNEVEN = ()
MOST = 16  # test files of each type


def load(folder: Path) -> tuple[onnx_model.Params, Path]:
    """Reads the weights; returns them and the path of their file. `folder` is not needed."""
    return onnx_model.load(NETWORK)[1], NETWORK


fn = onnx_model.load(NETWORK)[0]
save = onnx_model.save


def run_onnx(path: Path, inputs: np.ndarray) -> np.ndarray:
    """Returns the probabilities of the types, [files, types], that onnxruntime finds."""
    session = onnxruntime.InferenceSession(path)
    (source,) = session.get_inputs()
    return np.concatenate([session.run(None, {source.name: x[None]})[0] for x in inputs])


def record(part: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads files of this machine.

    Args:
      part: 0 to calibrate with, 1 to test with: files in other folders.
      count: files.
      seed: of the choice of files.

    Returns:
      (inputs, truth): int32[count, 2048] for `fn`; the numbers of their types.
    """
    paths = files.collect(2 * MOST, MOST)[part]
    if len(paths) < count:
        sys.exit(f"error: this machine has {len(paths)} files to use of {count}")
    paths = [paths[i] for i in np.random.default_rng(seed).permutation(len(paths))[:count]]
    return np.stack([files.features(path) for path in paths]), np.array([*map(files.truth, paths)])
