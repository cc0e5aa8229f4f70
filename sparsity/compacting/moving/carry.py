"""Takes kept values, and the moments of an optimizer like them, to new positions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.compacting.deferred import make_token
from sparsity.compacting.formats.base import FormatLayout, Token
from sparsity.compacting.moving.gradients import read_positions
from sparsity.core import owners, sharding, trees
from sparsity.core.trees import Params, Path, PyTree
from sparsity.masks.slice_layout import carry_values


@dataclasses.dataclass(frozen=True, eq=False)
class PositionChange:
    """Old and new positions of a parameter; takes values, and moments like them, to the new ones.

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
        stored = [self.positions, *kept]
        carry = functools.partial(sharding.shard_like, stored, self._carry)
        # In a branch XLA carries a donated array in place; outside, it would carry all at once.
        positions, *values = lax.cond(
            token == 0, carry, lambda stored, *_: stored, stored, self.new, fresh
        )
        return positions, values

    def _carry(
        self, stored: list[jax.Array], new: jax.Array, fresh: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Returns `stored`, positions and arrays of kept values, at new positions."""
        batch_shape = self.layout.batch_shape
        stored, new, fresh = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[len(batch_shape) :]), (stored, new, fresh)
        )

        def step(i: jax.Array, stored: list[jax.Array]) -> list[jax.Array]:
            # Each slice is written where it was read: donated arrays need no second copy.
            (old, *kept), digits, starts = jax.tree.map(lambda x: x[i], (stored, new, fresh))
            positions = read_positions(digits, old.dtype)
            slots, stays = self.layout.find_slots(old, positions)
            carry = functools.partial(carry_values, slots, stays)
            moved = [positions, *map(carry, kept, starts)]
            return [x.at[i].set(y) for x, y in zip(stored, moved, strict=True)]

        moved = lax.fori_loop(0, math.prod(batch_shape), step, stored)
        return [x.reshape(*batch_shape, *x.shape[1:]) for x in moved]


def carry_state(
    changes: Mapping[Path, PositionChange],
    params: Params,
    state: PyTree,
    fresh: PyTree | None,
    one_at_a_time: bool,
) -> tuple[dict[Path, jax.Array], PyTree, PyTree]:
    """Moves parameters and the state of their optimizer to new positions.

    Args:
      changes: the change of positions of each masked parameter that moves.
      params: tree of parameters; new entries start at 0.
      state: state of the optimizer.
      fresh: state of new entries, `None` for 0.
      one_at_a_time: whether each parameter waits for the one before, as in `Compact`.

    Returns:
      The new positions by path, the parameters, and the state.
    """
    change_tree = trees.map_matched(lambda path, _: changes.get(trees.path_names(path)), params)
    kept, starts = ({change: list[PyTree]() for change in changes.values()} for _ in range(2))

    def collect(
        change: PositionChange | None, leaf: jax.Array, start: jax.Array | None = None
    ) -> bool:
        is_kept = change is not None and jnp.shape(leaf) == change.layout.kept_shape
        if change is not None and is_kept:
            kept[change].append(leaf)
            starts[change].append(start)
        return is_kept

    kept_params = owners.map_owned(collect, change_tree, params)
    fresh_states = () if fresh is None else (fresh,)
    kept_state = owners.map_owned(collect, change_tree, state, *fresh_states)
    positions, moved, values = {}, {}, list[jax.Array]()
    for path, change in changes.items():
        token = make_token([*values, *kept[change]]) if one_at_a_time else 0
        positions[path], values = change.carry(kept[change], starts[change], token)
        moved[change] = iter(values)

    def replace(change: PositionChange | None, leaf: jax.Array, is_kept: bool) -> jax.Array:
        return next(moved[change]) if change is not None and is_kept else leaf

    params = owners.map_owned(replace, change_tree, params, kept_params)
    return positions, params, owners.map_owned(replace, change_tree, state, kept_state)
