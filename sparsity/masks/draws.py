"""Random scores that a search computes where it reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import chex
import jax
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.hashing import (
    Seed,
    generate_random_scores,
    hash_entries,
    hash_words,
    leaf_word,
    seed_words,
)
from sparsity.core.kernels import unstack, use_flat
from sparsity.core.trees import Params, PyTree
from sparsity.selection import EntryScores


class Draw(Protocol):
    """Function that draws random scores: `generate_random_scores`, or a result of `make_draw`."""

    def __call__(self, params: Params, rng_seed: Seed, step: chex.Numeric = 0) -> PyTree: ...


def make_draw(stored: PyTree) -> Draw:
    """Returns a `generate_random_scores` whose scores are lazy if they are traced.

    Args:
      stored: tree of the parameters as they are stored. Scores depend only on the shape of a
        parameter, so that masked parameters need not be computed.
    """
    likes = trees.leaves_by_path(stored)

    def draw(params: Params, rng_seed: Seed, step: chex.Numeric = 0) -> PyTree:
        if not any(map(is_traced, jax.tree.leaves(params))):  # nobody else would place the masks
            return generate_random_scores(params, rng_seed, step)
        words = _hash_leaves(trees.leaves_by_path(params), rng_seed, step)

        def lazy(key_path: trees.KeyPath, _: jax.Array) -> EntryScores:
            return EntryScores(hash_entries, (likes[key_path],), words[key_path], reads_index=True)

        return trees.map_matched(lazy, params)

    return draw


def _hash_leaves(
    leaves: Mapping[trees.KeyPath, jax.Array], rng_seed: Seed, step: chex.Numeric
) -> dict[trees.KeyPath, tuple[jax.Array, jax.Array]]:
    """Returns the two words of each parameter for `hash_entries`; one program hashes them all.

    Args:
      leaves: the parameters that get random scores, by path.
      rng_seed: as in `generate_random_scores`.
      step: as in `generate_random_scores`.
    """
    leaf_words = np.array([leaf_word(key_path) for key_path in leaves], np.uint32)
    states, offsets = hash_words(*seed_words(rng_seed, step), leaf_words)
    # One kernel reads the words of every leaf, at a place that it gets when it runs. Such reads
    # would change how XLA partitions arrays over devices: there each leaf has its kernel.
    is_local = all(map(use_flat, leaves.values()))
    split: Callable[[jax.Array], list[jax.Array]] = unstack if is_local else list
    pairs = zip(split(states), split(offsets), strict=True)
    return dict(zip(leaves, pairs, strict=True))
