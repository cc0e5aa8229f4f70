"""Lottery tickets: train, prune the smallest weights, rewind those that are left, and so on.

Sources: Frankle & Carbin 2019, "The lottery ticket hypothesis", section 1; Frankle et al. 2020,
"Linear mode connectivity and the lottery ticket hypothesis", algorithm 2, for rewinding to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.checks import check_fraction, check_int
from sparsity.core.trees import PyTree
from sparsity.masks import apply_masks
from sparsity.selection import global_topk_mask
from sparsity.sparsity_distributions import Uniform

Ticket: TypeAlias = tuple[PyTree, PyTree, PyTree]  # start, masks, trained


def lottery_ticket(
    train_fn: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    rounds: int,
    rate: float = 0.2,
    rewind_params: PyTree | None = None,
    *,
    done: Sequence[Ticket] = (),
) -> list[Ticket]:
    """Finds tickets of fewer and fewer weights, by iterative magnitude pruning.

    Of the n weights of all matrices and kernels round(n * (1 - rate)^r) are left in round r, those
    that training made largest: one ranking of |weight|, not normalized, ties to the lower index.
    What is pruned never returns.

    Args:
      train_fn: `train_fn(params, masks)` trains a network that starts from `params` and keeps what
        the masks prune at zero, for example by `StaticRandomSparse().wrap_optax(tx, masks=masks)`;
        it returns the trained parameters.
      params: what the dense network starts from.
      rounds: how often to prune, at least 0.
      rate: fraction of the weights left that a round removes, in [0, 1].
      rewind_params: what the pruned networks start from: the dense network a few steps on. `None`
        means `params`.
      done: tickets of an earlier call, which are not trained again; it goes on after them.

    Returns:
      (start, masks, trained) of each round, `rounds` + 1 of them, the first dense. A start has the
      bits of `rewind_params` where its masks keep them, and zeros elsewhere; masks are `None` for
      leaves that stay dense.

    Raises:
      ValueError: an argument is out of range, or trained parameters have another structure.

    Example:
      >>> params = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
      >>> train_fn = lambda params, masks: jax.tree.map(lambda w: 5 * w - w**2, params)  # 4 6 6 4
      >>> tickets = lottery_ticket(train_fn, params, rounds=2, rate=0.5)
      >>> [masks["w"].tolist() for _, masks, _ in tickets]
      [[[1, 1], [1, 1]], [[0, 1], [1, 0]], [[0, 1], [0, 0]]]
      >>> tickets = lottery_ticket(train_fn, params, rounds=3, rate=0.5, done=tickets)
    """
    check_int("rounds", rounds, 0)
    check_fraction("rate", rate)
    targets = Uniform(rate)(params)
    tickets = list(done)
    for r in range(len(tickets), rounds + 1):
        if r == 0:
            masks = trees.map_matched(_ones, params, targets)
            start = params
        else:
            _, old, trained = tickets[-1]
            masks = _pruned(old, trained, rate, r)
            start = apply_masks(params if rewind_params is None else rewind_params, masks)
        # Of copies, which may be donated.
        trained = train_fn(*jax.tree.map(jnp.copy, (start, masks)))
        given, found = (
            [
                f"{trees.path_string(path)}{list(jnp.shape(leaf))}"
                for path, leaf in trees.leaves_by_path(tree).items()
            ]
            for tree in (params, trained)
        )
        if given != found:
            raise ValueError(
                f"train_fn must return the parameters that it got, {trees.listed(given)}, got "
                f"{trees.listed(found)}."
            )
        tickets.append((start, masks, trained))
    return tickets


def _ones(_: trees.KeyPath, param: Any, target: Any) -> Any:
    return None if target is None else jnp.ones_like(param, jnp.uint8)


def _pruned(masks: PyTree, trained: PyTree, rate: float, r: int) -> PyTree:
    """The masks of round r, within those of the round before."""
    sizes = trees.map_matched(
        lambda _, param, mask: None if mask is None else jnp.abs(param), trained, masks
    )
    leaves = jax.tree.leaves(sizes)
    n = sum(leaf.size for leaf in leaves)
    dtype = jnp.result_type(*leaves)
    sizes = jax.tree.map(lambda leaf: leaf.astype(dtype), sizes)
    left = max(1, round(n * (1 - rate) ** r))
    return global_topk_mask(sizes, left, where=masks)
