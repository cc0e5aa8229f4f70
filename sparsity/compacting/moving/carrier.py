"""Takes kept values, and the moments of an optimizer like them, to new positions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.compacting.deferred import make_token
from sparsity.compacting.formats.base import FormatLayout, Token
from sparsity.compacting.moving.gradients import read_positions
from sparsity.core import owners, sharding, trees
from sparsity.core.trees import Params, Path, PyTree


class SliceMove(NamedTuple):
    """Kept arrays of a slice, or of all slices as [*stack, ...], and where their entries go.

    Attributes:
      old: positions of the kept entries.
      new: the new positions.
      kept: kept values and moments.
      fresh: values of entries that are new, for each of `kept`; `None` for 0.
    """

    old: jax.Array
    new: jax.Array
    kept: Sequence[jax.Array]
    fresh: Sequence[jax.Array | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Carrier:
    """Takes values of a parameter, and moments like them, to new positions.

    Attributes:
      layout: layout of the kept values.
      positions: where the values lie before.
      new: the new positions, as `read_positions` takes them.
    """

    layout: FormatLayout
    positions: jax.Array
    new: jax.Array

    def carry(
        self, kept: Sequence[jax.Array], fresh: Sequence[jax.Array | None], token: Token
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the new positions, and arrays of kept values there.

        Args:
          kept: kept values and moments.
          fresh: values for entries that are new, for each of `kept`; `None` for 0.
          token: an int32 0 that depends on the arrays that were carried before.
        """
        move = SliceMove(self.positions, self.new, kept, fresh)
        carry = functools.partial(sharding.shard_like, [self.positions, *kept], self._carry)
        # XLA carries a donated array in place in a branch, and all arrays at once without one.
        positions, *values = lax.cond(token == 0, carry, lambda move: [move.old, *move.kept], move)
        return positions, values

    def _carry(self, move: SliceMove) -> list[jax.Array]:
        sizes = self.layout.batch_shape
        move = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(sizes) :]), move)

        def step(i: jax.Array, stored: list[jax.Array]) -> list[jax.Array]:
            # Each slice is written where it was read: donated arrays need no second copy.
            old, *kept = stored
            each: SliceMove = jax.tree.map(lambda x: x[i], move._replace(old=old, kept=kept))
            each = each._replace(new=read_positions(each.new, old.dtype))
            moved = [each.new, *self._carry_slice(each)]
            return [x.at[i].set(y) for x, y in zip(stored, moved, strict=True)]

        moved = lax.fori_loop(0, math.prod(sizes), step, [move.old, *move.kept])
        return [x.reshape(*sizes, *x.shape[1:]) for x in moved]

    def _carry_slice(self, move: SliceMove) -> list[jax.Array]:
        slots, stays = self.layout.find_slots(move.old, move.new)

        def pick(values: jax.Array, start: jax.Array | None) -> jax.Array:
            shape = (*stays.shape, *[1] * (values.ndim - stays.ndim))  # members of groups follow
            if slots is not None:
                at = slots.reshape(shape)
                values = jnp.take_along_axis(values, at, stays.ndim - 1, mode="clip")
            zero = jnp.zeros((), values.dtype)
            return jnp.where(stays.reshape(shape), values, zero if start is None else start)

        return [pick(*pair) for pair in zip(move.kept, move.fresh, strict=True)]


def carry_state(
    carriers: Mapping[Path, Carrier],
    params: Params,
    state: PyTree,
    fresh: PyTree | None,
    in_turn: bool,
) -> tuple[dict[Path, jax.Array], PyTree, PyTree]:
    """Moves parameters and the state of their optimizer to new positions.

    Args:
      carriers: a carrier for each masked parameter.
      params: tree of parameters; new entries start at 0.
      state: state of the optimizer.
      fresh: state of new entries, `None` for 0.
      in_turn: whether each parameter waits for the one before, as in `Compact`.

    Returns:
      The new positions by path, the parameters, and the state.
    """
    owner_tree = trees.map_matched(lambda path, _: carriers.get(trees.path_names(path)), params)
    kept, starts = ({owner: list[PyTree]() for owner in carriers.values()} for _ in range(2))

    def collect(owner: Carrier | None, leaf: jax.Array, start: jax.Array | None = None) -> bool:
        is_kept = owner is not None and jnp.shape(leaf) == owner.layout.kept_shape
        if owner is not None and is_kept:
            kept[owner].append(leaf)
            starts[owner].append(start)
        return is_kept

    moves_params = owners.map_owned(collect, owner_tree, params)
    fresh_states = () if fresh is None else (fresh,)
    moves_state = owners.map_owned(collect, owner_tree, state, *fresh_states)
    positions, moved, values = {}, {}, list[jax.Array]()
    for path, owner in carriers.items():
        token = make_token([*values, *kept[owner]]) if in_turn else 0
        positions[path], values = owner.carry(kept[owner], starts[owner], token)
        moved[owner] = iter(values)

    def replace(owner: Carrier | None, leaf: jax.Array, is_kept: bool) -> jax.Array:
        return next(moved[owner]) if owner is not None and is_kept else leaf

    params = owners.map_owned(replace, owner_tree, params, moves_params)
    return positions, params, owners.map_owned(replace, owner_tree, state, moves_state)
