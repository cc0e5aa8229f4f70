"""Moves the masks of a compact model: one mask update of SET, RigL or SRigL, slice by slice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.compacting.deferred import make_token
from sparsity.compacting.formats.base import FormatLayout
from sparsity.core import hashing, sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import Params, Path, PyTree
from sparsity.masks import Site, Sites
from sparsity.masks.slice_layout import map_rows, scatter
from sparsity.patterns.base import keep_active
from sparsity.selection import topk_mask
from sparsity.training.hooks import SliceRule, StepInputs, UpdaterHooks
from sparsity.training.state import SparseState
from sparsity.training.step import call_mask_hooks


class SliceArrays(NamedTuple):
    """Arrays of a parameter that a mask update reads, [*stack, ...]; or of one part that moves.

    Attributes:
      values: kept values.
      positions: where they lie.
      offset: flat index of the first entry of each slice.
      step: number of steps so far, for each slice.
      word: hash of the path of the parameter, for each slice.
      gradient: gradients of the kept values that a loss reads directly, without `apply`.
    """

    values: jax.Array
    positions: jax.Array
    offset: jax.Array
    step: jax.Array
    word: jax.Array
    gradient: jax.Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class MaskUpdate:
    """Mask update of one parameter.

    Attributes:
      updater: the updater.
      example: shapes of the dense parameters.
      sites: table of the sites of the parameters.
      target: target sparsity of the parameter.
      path: key path of the parameter.
      layout: layout of the parameter.
      rule: rule by which slices move one by one; `None` if the parameter moves at once.
    """

    updater: UpdaterHooks
    example: PyTree
    sites: Sites
    target: chex.Numeric | None
    path: trees.KeyPath
    layout: FormatLayout
    rule: SliceRule | None

    @property
    def site(self) -> Site:
        return self.sites[self.path]

    @functools.cached_property
    def part_layout(self) -> FormatLayout:
        """Layout of the part that moves at once: a slice with stack axes of size 1, or all."""
        stack = () if self.rule is None else self.layout.stack
        shape = (1 if axis in stack else size for axis, size in enumerate(self.layout.shape))
        return dataclasses.replace(self.layout, shape=tuple(shape))

    @property
    def depth(self) -> int:
        """Number of leading axes of `SliceArrays` that index parts."""
        return 0 if self.rule is None else len(self.layout.stack)

    @property
    def strides(self) -> list[int]:
        """Steps of the flat index of the parameter, for each axis."""
        return hashing.flat_strides(self.layout.shape)

    def program_key(self) -> Hashable:
        """Returns a key that is equal for parameters whose slices move by one program."""
        site, target = self.site, self.target
        dtype = trees.leaves_by_path(self.example)[self.path].dtype
        number = target if target is None or is_traced(target) else float(target)
        return self.part_layout, site.pattern, site.batch_axes, number, dtype

    def make_slices(
        self,
        values: jax.Array,
        positions: jax.Array,
        count: chex.Numeric,
        gradient: jax.Array | None,
    ) -> SliceArrays:
        """Returns the slices of the parameter."""
        stack = self.layout.stack[: self.depth]
        sizes = [self.layout.shape[axis] for axis in stack]
        strides = [self.strides[axis] for axis in stack]
        offset = sum(x * y for x, y in zip(np.indices(sizes), strides, strict=True))
        return SliceArrays(
            values,
            positions,
            jnp.asarray(np.broadcast_to(offset, sizes).astype(np.int32)),
            jnp.broadcast_to(jnp.asarray(count, jnp.int32), sizes),
            jnp.full(sizes, hashing.leaf_word(self.path)),
            gradient,
        )

    def find_positions(self, part: SliceArrays, gradient: jax.Array | None = None) -> jax.Array:
        """Returns the new positions of a part.

        Args:
          part: the part.
          gradient: gradient of the dense part, sizes in the order of the layout.
        """
        # Before a loop XLA computes, and stores, all that its rounds share, such as the flat
        # indices of entries. XLA takes nothing out of a branch.
        always = jnp.min(part.positions, initial=0) >= 0
        return lax.cond(
            always, lambda: self._find_positions(part, gradient), lambda: part.positions
        )

    def _find_positions(self, part: SliceArrays, gradient: jax.Array | None) -> jax.Array:
        layout = self.part_layout
        shape, positions = layout.kept_shape, part.positions.reshape(layout.positions_shape)
        # With the token, XLA builds the dense slice only after the gradient.
        token = 0 if gradient is None else make_token([gradient])

        def densify_values(values: jax.Array) -> jax.Array:
            return layout.wrap(values.reshape(shape), positions).densify(token)

        if gradient is not None:
            kept = layout.wrap(part.values.reshape(shape), positions)
            gradient = gradient.reshape(kept.sizes).transpose(kept.axes)
            if part.gradient is not None:
                gradient = gradient + densify_values(part.gradient)
        param = densify_values(part.values)  # compiled only where a score reads the weight
        is_stack = self.site.batch_axes == len(layout.stack)
        num_rows = layout.count_unit_rows(self.site.pattern) if is_stack else None
        if self.rule is not None and self.rule.move is None and num_rows is not None:
            waiting = part._replace(positions=positions + token)
            new = self._find_positions_by_unit(waiting, num_rows, param, gradient)
        else:
            mask = densify_values(jnp.ones(shape, jnp.uint8))
            move = self._move_parameter if self.rule is None else self._move_slice
            new = layout.locate(move(part, param, mask, gradient))
        return new.astype(part.positions.dtype).reshape(part.positions.shape)

    def _move_parameter(
        self, part: SliceArrays, param: jax.Array, mask: jax.Array, gradient: jax.Array | None
    ) -> jax.Array:
        """Returns the new mask of the parameter, from the hooks of the updater."""
        state = SparseState(self._tree(mask), None, self._tree(self.target), part.step, None)
        gradients = None if gradient is None else self._tree(gradient)
        inputs = StepInputs(self._tree(param), gradients, self.sites)
        masks = call_mask_hooks(self.updater, state, inputs).masks
        return trees.leaves_by_path(masks)[self.path]

    def _move_slice(
        self, part: SliceArrays, param: jax.Array, mask: jax.Array, gradient: jax.Array | None
    ) -> jax.Array:
        """Returns the new mask of a slice, by the rule or the pattern."""
        assert self.rule is not None
        grow, fraction = self._grow_scores(part, param, gradient), self.rule.fraction(part.step)
        arguments, axes = (mask, jnp.abs(param), grow, fraction), self.site.batch_axes
        if self.rule.move is not None:
            return self.rule.move(*arguments, self.target, batch_axes=axes)
        return self.site.pattern.move(*arguments, batch_axes=axes)

    def _find_positions_by_unit(
        self, part: SliceArrays, num_rows: int, param: jax.Array, gradient: jax.Array | None
    ) -> jax.Array:
        """Returns the new positions of entries, or of the inputs of groups, row by row."""
        assert self.rule is not None
        layout, pattern = self.part_layout, self.site.pattern
        drop = layout.pool(jnp.abs(part.values), pattern)
        grow = pattern.pool(self._grow_scores(part, param, gradient), self.site.batch_axes)
        drop, grow, positions = (x.reshape(num_rows, -1) for x in (drop, grow, part.positions))
        fraction = self.rule.fraction(part.step)
        return layout.locate_units(_drop_and_grow(drop, grow, positions, fraction))

    def _grow_scores(
        self, part: SliceArrays, param: jax.Array, grad: jax.Array | None
    ) -> jax.Array:
        assert self.rule is not None
        inputs = StepInputs(param, grad, self.sites)
        state = SparseState(None, None, None, part.step, None)
        draw = functools.partial(self._draw, part)
        return inputs.call(self.rule.grow, state, param, grad, named={"draw": draw})

    def find_positions_alike(
        self, each: list[tuple[SliceArrays, jax.Array | None]]
    ) -> list[jax.Array]:
        """Returns the new positions of parameters of one `program_key`, part by part."""

        def flatten(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[self.depth :])

        parts = [jax.tree.map(flatten, arrays) for arrays in each]
        counts = [len(part.step) for part, _ in parts]
        # A switch copies one part at a time; joined arrays would be a copy of all.

        def find(place: tuple[jax.Array, jax.Array]) -> jax.Array:
            index, row = place
            reads = [lambda row, x=x: jax.tree.map(lambda a: a[row], x) for x in parts]
            return self.find_positions(*lax.switch(index, reads, row))

        places = np.repeat(np.arange(len(parts)), counts), np.concatenate([*map(np.arange, counts)])
        new = lax.map(find, places)
        pairs = zip(jnp.split(new, np.cumsum(counts)[:-1]), each, strict=True)
        return [x.reshape(old.positions.shape) for x, (old, _) in pairs]

    def _tree(self, array: chex.Numeric | None) -> PyTree:
        """Returns a tree like the parameters with one array or number."""
        return trees.map_matched(lambda path, _: array if path == self.path else None, self.example)

    def _draw(
        self, part: SliceArrays, params: Params, rng_seed: hashing.Seed, step: chex.Numeric = 0
    ) -> PyTree:
        """Returns the random scores that the entries of a part have in the parameter."""
        words = hashing.hash_words(*hashing.seed_words(rng_seed, step), part.word)
        index = hashing.flat_index(self.part_layout.shape, self.strides) + part.offset
        return hashing.hash_entries(index, *words)


def find_all_positions(
    mask_updates: Mapping[Path, MaskUpdate],
    slices: Mapping[Path, SliceArrays],
    gradients: Mapping[Path, jax.Array] = MappingProxyType({}),
) -> dict[Path, jax.Array]:
    """Returns the new positions of parameters, slice by slice, by one program for equal shapes.

    Args:
      mask_updates: mask updates by path.
      slices: slices by path.
      gradients: dense gradients, where a loss gives them; axes in the order of the layout.
    """
    paths_by_key: dict[Hashable, list[Path]] = {}
    for path, mask_update in mask_updates.items():
        arrays = slices[path], gradients.get(path)
        key = mask_update.program_key(), jax.tree.structure(arrays)
        paths_by_key.setdefault(path if mask_update.rule is None else key, []).append(path)
    new: dict[Path, jax.Array] = {}
    for paths in paths_by_key.values():
        each = [(slices[path], gradients.get(path)) for path in paths]
        likes = [slices[path].positions for path in paths]
        each_new = sharding.shard_like(likes, mask_updates[paths[0]].find_positions_alike, each)
        new |= zip(paths, each_new, strict=True)
    return new


def _drop_and_grow(
    drop: jax.Array,
    grow: jax.Array,
    positions: jax.Array,
    drop_fraction: chex.Numeric,
) -> jax.Array:
    """Returns the mask of each row after an update; see `SparsityType.move`.

    A unit is an entry, or an input of a group of outputs. Scores of stored units are never dense.

    Args:
      drop: [rows, k] scores of the stored units; those with the lowest are dropped.
      grow: [rows, units] scores; of all units that are not kept, those with the highest grow.
      positions: [rows, k] places of the stored units, `units` or more for padding.
      drop_fraction: scalar in [0, 1].

    Returns:
      uint8[rows, units].
    """
    flags, lost = keep_active(positions < grow.shape[1], drop, drop_fraction, 1)
    kept = map_rows(functools.partial(scatter, grow.shape[1]), positions, flags)
    return kept | topk_mask(grow, lost, where=kept == 0, batch_axes=1)
