"""Lottery tickets: repeats training, pruning of the smallest weights, and rewinding.

Sources: Frankle & Carbin 2019, "The lottery ticket hypothesis", section 1; Frankle et al. 2020,
"Linear mode connectivity and the lottery ticket hypothesis", algorithm 2, for rewinding to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.algorithms.at_init import make_ones, mask_highest
from sparsity.core import checks, trees
from sparsity.core.trees import Masks, Params, PyTree, Tree
from sparsity.masks import apply_masks

Ticket: TypeAlias = tuple[Tree, Masks, Tree]  # start, masks, trained


def lottery_ticket(
    train_fn: Callable[[Tree, Masks], Tree],
    params: Tree,
    rounds: int,
    rate: float = 0.2,
    rewind_params: Tree | None = None,
    *,
    done: Sequence[Ticket[Tree]] = (),
) -> list[Ticket[Tree]]:
    """Finds tickets of fewer and fewer weights, by iterative magnitude pruning.

    Of the n weights of all matrices and kernels, round r keeps the round(n * (1 - rate)^r) weights
    that are largest after training: one ranking of |weight|, not normalized, ties to the lower
    index. Pruned weights never return. Sources: Frankle & Carbin 2019; Frankle et al. 2020.

    Args:
      train_fn: `train_fn(params, masks)` returns trained parameters with pruned weights at zero, as
        with `StaticRandomSparse().wrap_optax(tx, masks=masks)`.
      params: initial parameters of the dense network.
      rounds: number of prunings, at least 0.
      rate: fraction of the remaining weights that a round removes, in [0, 1].
      rewind_params: initial parameters of the pruned networks, often the dense network after a few
        steps. `None` means `params`.
      done: tickets of an earlier call at the same rate, which are not trained again.

    Returns:
      List of `rounds` + 1 tickets (start, masks, trained), the first one dense. A start has the
      bits of `rewind_params` where its masks keep weights, and zeros elsewhere; masks are `None`
      for parameters that stay dense.

    Raises:
      ValueError: an argument is out of range, parameters differ in structure, weights to rank or to
        rewind to are not finite, or `done` belongs to another model or rate. The message names leaf
        and round.

    Example:
      >>> params = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
      >>> train_fn = lambda params, masks: jax.tree.map(lambda w: 5 * w - w**2, params)  # 4 6 6 4
      >>> tickets = lottery_ticket(train_fn, params, rounds=2, rate=0.5)
      >>> [masks["w"].tolist() for _, masks, _ in tickets]
      [[[1, 1], [1, 1]], [[0, 1], [1, 0]], [[0, 1], [0, 0]]]
      >>> tickets = lottery_ticket(train_fn, params, rounds=3, rate=0.5, done=tickets)
    """
    _check_arguments(train_fn, rounds, rate, done)
    ones = make_ones(params, rate)
    origin = params if rewind_params is None else rewind_params
    _check_like("rewind_params must have the leaves of params,", origin, params)
    for role, tree in (("params", params), ("rewind_params", origin)):
        _check_finite(role, tree, ones)
    tickets = [_read_ticket(r, ticket) for r, ticket in enumerate(list(done)[: rounds + 1])]
    for r, (start, masks, _) in enumerate(tickets):
        _check_like(f"done[{r}]: start must have the leaves", start, params)
        _check_number(r, masks, _count_kept(ones, rate, r))
    for r in range(len(tickets), rounds + 1):
        start, masks = _rewind(tickets[-1], origin, rate, r) if r else (params, ones)
        # Copies, because train_fn may donate its arguments.
        trained = train_fn(*jax.tree.map(_copy_array, (start, masks)))
        _check_like("train_fn must return the parameters that it got,", trained, params)
        tickets.append((start, masks, trained))
    return tickets


def _check_arguments(train_fn: object, rounds: object, rate: object, done: object) -> None:
    """Raises a ValueError for arguments of other types, or out of range."""
    checks.check_function("train_fn", train_fn, "(params, masks)")
    checks.check_int("rounds", rounds, 0)
    checks.check_fraction("rate", rate)
    checks.check_iterable("done", done)


def _read_ticket(r: int, ticket: Ticket[Tree]) -> Ticket[Tree]:
    checks.check_kind(f"done[{r}]", ticket, tuple | list, "a ticket (start, masks, trained)")
    start, masks, trained = ticket
    return start, masks, trained


def _check_like(requirement: str, tree: PyTree, params: Params) -> None:
    """Raises a ValueError unless a tree has the leaves of the parameters."""

    def describe(tree: PyTree) -> list[str]:
        leaves = trees.leaves_by_path(tree).items()
        return [f"{trees.path_string(path)}{list(jnp.shape(leaf))}" for path, leaf in leaves]

    if (expected := describe(params)) != (got := describe(tree)):
        raise ValueError(f"{requirement} {trees.listed(expected)}, got {trees.listed(got)}.")


def _check_number(r: int, masks: Masks, expected: int) -> None:
    """Raises a ValueError unless the masks of round r keep as many weights as the rate says."""
    num_kept = sum(int(np.count_nonzero(x)) for x in jax.device_get(jax.tree.leaves(masks)))
    if num_kept != expected:
        raise ValueError(
            f"done[{r}] keeps {num_kept} weights, and the rate keeps {expected} in round {r}. Give "
            "the rate of the earlier call."
        )


def _check_finite(role: str, tree: PyTree, masks: Masks) -> None:
    """Raises a ValueError that names a leaf whose kept weights are not finite."""

    def check(path: trees.KeyPath, weights: jax.Array, mask: jax.Array | None) -> None:
        if mask is None or checks.is_traced(weights):
            return
        if not jax.device_get(jnp.all(jnp.isfinite(weights) | (mask == 0))):
            raise ValueError(
                f"{role}: the weights at {trees.path_string(path)!r} are not all finite, so that "
                "their magnitudes rank nothing. Lower the learning rate, or clip the gradients."
            )

    trees.map_matched(check, tree, masks)


def _copy_array(leaf: PyTree) -> PyTree:
    return jnp.copy(leaf) if trees.is_array(leaf) else leaf


def _rewind(ticket: Ticket[Tree], origin: Tree, rate: float, r: int) -> tuple[Tree, Masks]:
    """Returns the initial parameters and the masks of round r, from the ticket before."""
    _, masks, trained = ticket
    _check_finite(f"what train_fn returned in round {r - 1}", trained, masks)
    magnitudes = jax.tree.map(jnp.abs, trees.prunable(trained))
    masks = mask_highest(masks, magnitudes, _count_kept(masks, rate, r))
    return apply_masks(origin, masks), masks


def _count_kept(masks: Masks, rate: float, r: int) -> int:
    """Returns the number of weights that round r keeps."""
    n = sum(mask.size for mask in jax.tree.leaves(masks))
    # In float64: n * (1 - rate) of a float32 may round up to a half.
    num_kept: int = round(n * (1 - float(rate)) ** r)
    return max(1, num_kept)
