"""Finds the channels that masks leave dead: without them the masked model computes the same.

A channel is dead if its removal is proven from the members of its group that are masked there. Two
cases are typical: all entries that read the channel are masked, or all entries that compute it are
masked and its readers read 0. Removing a channel removes entries of others, so the search repeats
until it proves no further channel dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from sparsity.core.trees import Path
from sparsity.graph import ChannelGroup, Graph
from sparsity.graph.depth import LayerStack
from sparsity.programs.axes import AxisIndex, KeptIndices, Variable, list_variables

Members: TypeAlias = frozenset[int]  # indices of members of a group
Evidence: TypeAlias = Mapping[Path, Mapping[AxisIndex, Sequence[np.ndarray]]]  # as in `Plan`
# bool, 1 where an entry is neither masked nor removed
LiveMasks: TypeAlias = Mapping[Path, np.ndarray]


def find_dead(
    graph: Graph, masks: Mapping[Path, jax.Array]
) -> tuple[dict[Variable, np.ndarray], Evidence]:
    """Returns the channels that stay of each group that loses some, and the evidence of the cut.

    Layers of a scan that choose for themselves keep equally many channels: where more are dead, the
    first are removed. A group keeps one channel where the model reduces over all of them.

    Args:
      graph: the graph of the model.
      masks: {path: mask of the shape of the parameter}; parameters without a mask are dense.

    Returns:
      {variable: channels that stay}, [layers, indices] where layers choose for themselves; and the
      evidence, {path: {axis: indices for each layer}}: removed indices whose entries were all
      masked, or removed before.
    """
    live = {path: np.not_equal(mask, 0) for path, mask in masks.items()}
    evidence: dict[Path, dict[AxisIndex, np.ndarray]] = {}
    kept = _remove_layers(graph, live, evidence)
    groups = [group for group in graph.groups if any(path in live for path, _ in group.members)]
    masked = {group: _find_masked(group, live) for group in groups}
    removed = {group: np.zeros(x.shape[:2], bool) for group, x in masked.items()}
    proofs = _Proofs(graph)
    # Removed channels leave entries of other groups without a use: repeats until nothing changes.
    while masked:
        dead = proofs.find_removable(masked)
        changed_paths = set()
        for group in masked:
            least = int(group.variable in graph.removal.never_empty)
            removable = _choose_removable(dead[group], removed[group], least)
            if removable.any():
                _note_evidence(group, masked[group] & removable[..., None], graph, evidence)
                removed[group] |= removable
                changed_paths |= _remove(group, removable[..., None] & ~masked[group], live)
        affected_groups = [g for g in groups if any(path in changed_paths for path, _ in g.members)]
        masked = {group: _find_masked(group, live) for group in affected_groups}
    for group, is_removed in removed.items():
        if is_removed.any():
            rows = np.stack([np.flatnonzero(~row) for row in is_removed])
            kept[group.variable] = rows if group.layers else rows[0]
    return kept, {
        path: {axis: [np.flatnonzero(row) for row in rows] for axis, rows in axes.items()}
        for path, axes in evidence.items()
    }


def _remove_layers(
    graph: Graph,
    live: dict[Path, np.ndarray],
    evidence: dict[Path, dict[AxisIndex, np.ndarray]],
) -> dict[Variable, np.ndarray]:
    """Removes the layers of scans that return what they read; returns those that stay.

    Args:
      graph: the graph of the model.
      live: {path: bool, 1 where an entry is not masked}, which lose these layers.
      evidence: gets the layers of which all entries of a parameter are masked.
    """
    kept = {}
    for stack in graph.stacks:
        masked: dict[Path, np.ndarray] = {
            path: ~np.any(live[path], axis=tuple(range(1, live[path].ndim)))
            if path in live
            else np.zeros(stack.scan.length, bool)
            for path in graph.removal.list_stacked(stack.variable)
        }
        is_dead = np.all([masked[path] for path in stack.paths], axis=0)
        is_dead[0] &= not is_dead.all()  # one layer stays
        if is_dead.any() and _is_provable(graph, stack, masked, is_dead):
            kept[stack.variable] = np.flatnonzero(~is_dead)
            for path, layers in masked.items():
                evidence[path] = {0: (layers & is_dead)[None]}
                if path in live:
                    live[path] = live[path][~is_dead]
    return kept


def _is_provable(
    graph: Graph, stack: LayerStack, masked: Mapping[Path, np.ndarray], is_dead: np.ndarray
) -> bool:
    """Returns whether layers can go, where the parts of parameters are 0 that are masked.

    Besides their scan, others may read the parameters: a sum over all layers, for example.
    """
    zeros = {path for path, layers in masked.items() if layers[is_dead].all()}
    zeros -= graph.removal.updated_state
    unproven = graph.removal.find_unproven({path: {(0, stack.variable)} for path in zeros})
    return zeros.issuperset(stack.paths) and stack.variable not in unproven


def find_name_in_use(graph: Graph, kept: KeptIndices, evidence: Evidence) -> str | None:
    """Returns the name of a group or of layers that need removed entries, or `None`.

    Args:
      graph: a graph of the model for other arguments.
      kept: {variable: channels that stay}.
      evidence: the evidence of the cut, as in `Plan`.
    """
    for stack in graph.stacks:
        if stack.variable in kept:
            is_dead = ~mark_kept(kept[stack.variable], stack.scan.length)[0]
            masked = {
                path: is_dead if rows is None else np.isin(np.arange(len(is_dead)), rows[0])
                for path in graph.removal.list_stacked(stack.variable)
                for rows in [evidence.get(path, {}).get(0)]
            }
            if not _is_provable(graph, stack, masked, is_dead):
                return stack.name
    cases, removed = {}, {}
    for group in graph.groups:
        if group.variable in kept:
            removed[group] = ~mark_kept(kept[group.variable], group.size)
            is_masked = np.zeros((*removed[group].shape, len(group.members)), bool)
            members = zip(group.members, group.positions, strict=True)
            for member_index, ((path, axis), positions) in enumerate(members):
                rows = evidence.get(path, {}).get(axis)
                if rows is None:
                    is_masked[..., member_index] = True
                    continue
                is_noted = np.stack([np.isin(positions, row).all(axis=1) for row in rows])
                is_layered = len(is_noted) == len(is_masked)
                is_masked[..., member_index] = is_noted if is_layered else is_noted.all(axis=0)
            cases[group] = is_masked & removed[group][..., None]
    dead = _Proofs(graph).find_removable(cases)
    in_use = [group for group in cases if (removed[group] & ~dead[group]).any()]
    proven = [group for group in cases if group not in in_use]
    # Where all factors of an axis seem empty, one that is proven empty takes the others along.
    empty = {group.variable for group in proven if not kept[group.variable].shape[-1]}
    axes = {x.path: axes for x, axes in graph.removal.list_parameter_axes()} if empty else {}

    def is_void(group: ChannelGroup) -> bool:
        return not kept[group.variable].shape[-1] and all(
            not empty.isdisjoint(list_variables(axes[path][axis])) for path, axis in group.members
        )

    return next((group.name for group in in_use if not (empty and is_void(group))), None)


def mark_kept(index: np.ndarray, size: int) -> np.ndarray:
    """Returns bool[layers, size]: the entries of an axis that stay, one row if layers agree."""
    indices = np.atleast_2d(index)
    is_kept: np.ndarray = np.zeros((len(indices), size), bool)
    np.put_along_axis(is_kept, indices, True, axis=1)
    return is_kept


class _Proofs:
    """Proofs that channels are dead, by the members of their group that are masked there."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._verdicts: dict[ChannelGroup, dict[Members, bool]] = {}

    def find_removable(
        self, masked: Mapping[ChannelGroup, np.ndarray]
    ) -> dict[ChannelGroup, np.ndarray]:
        """Returns bool[layers, channels] for each group: the channels whose removal is proven.

        Args:
          masked: {group: bool[layers, channels, members]}, 1 where all entries are masked.
        """
        cases, indices = {}, {}
        for group, is_masked in masked.items():
            is_static = [path not in self._graph.removal.updated_state for path, _ in group.members]
            rows = (is_masked & is_static).reshape(-1, len(is_static))
            unique, case_indices = np.unique(rows, axis=0, return_inverse=True)
            cases[group] = [frozenset(np.flatnonzero(row).tolist()) for row in unique]
            indices[group] = case_indices.reshape(is_masked.shape[:2])
        self._prove_cases(cases)
        return {
            group: np.array([self._verdicts[group][case] for case in cases[group]])[index]
            for group, index in indices.items()
        }

    def _prove_cases(self, cases: Mapping[ChannelGroup, Collection[Members]]) -> None:
        """Proves or refuses each case; one pass over the program serves a case of every group."""
        undecided = {group: sorted(cases[group], key=len) for group in cases}
        while any(undecided.values()):
            trial: dict[ChannelGroup, Members] = {}
            entries: dict[Path, set[tuple[AxisIndex, Variable]]] = {}
            for group, queue in undecided.items():
                verdicts = self._verdicts.setdefault(group, {frozenset(): False})
                while queue and group not in trial:
                    case = queue.pop()
                    # Fewer masked members than in a refused case prove nothing.
                    if any(case < other for other, is_proven in verdicts.items() if not is_proven):
                        verdicts.setdefault(case, False)
                    elif case not in verdicts:
                        trial[group] = case
                        for path, axis in (group.members[i] for i in case):
                            entries.setdefault(path, set()).add((axis, group.variable))
            unproven = self._graph.removal.find_unproven(entries) if trial else set()
            for group, case in trial.items():
                self._verdicts[group][case] = group.variable not in unproven


def _list_members(
    group: ChannelGroup, live: LiveMasks
) -> Iterator[tuple[int, Path, np.ndarray, np.ndarray]]:
    """Yields the members of a group whose parameters have a mask.

    Yields:
      The index of the member, the path of the parameter, int[channels, n], where each channel lies
      along its axis, and a view of the live entries: bool[layers or 1, size of the axis, ...].
    """
    members = zip(group.members, group.positions, strict=True)
    for member_index, ((path, axis), positions) in enumerate(members):
        if path in live:
            layers = live[path] if group.layers else live[path][None]
            by_channel = np.moveaxis(layers, axis if group.layers else axis + 1, 1)
            yield member_index, path, positions, by_channel


def _find_masked(group: ChannelGroup, live: LiveMasks) -> np.ndarray:
    """Returns bool[layers, channels, members]: 1 where no entry of a member is live."""
    masked = [np.zeros((1, group.size), bool)] * len(group.members)
    for member_index, _, positions, entries in _list_members(group, live):
        pooled = np.any(entries, axis=tuple(range(2, entries.ndim)))
        masked[member_index] = ~pooled[:, positions].any(axis=2)
    return np.stack(np.broadcast_arrays(*masked), axis=-1)


def _choose_removable(dead: np.ndarray, removed: np.ndarray, least: int) -> np.ndarray:
    """Returns bool[layers, channels]: dead channels to remove, equally many in each layer."""
    candidates = dead & ~removed
    # `least` channels stay. Layers have lost equally many so far, so that one row tells.
    max_count = dead.shape[1] - least - removed[0].sum()
    count = min(candidates.sum(axis=1).min(), max_count)
    return candidates & (np.cumsum(candidates, axis=1) <= count)


def _note_evidence(
    group: ChannelGroup,
    masked: np.ndarray,
    graph: Graph,
    evidence: dict[Path, dict[AxisIndex, np.ndarray]],
) -> None:
    """Adds bool[layers, channels, members] of removed channels to {path: {axis: bool}}."""
    members = zip(group.members, group.positions, strict=True)
    for member_index, ((path, axis), positions) in enumerate(members):
        size = graph.parameters.find_shape(path)[axis]
        is_noted = np.zeros((len(masked), size), bool)
        is_noted[:, positions] = masked[..., member_index, None]
        axes = evidence.setdefault(path, {})
        axes[axis] = axes.get(axis, np.zeros((1, size), bool)) | is_noted


def _remove(group: ChannelGroup, removable: np.ndarray, live: LiveMasks) -> set[Path]:
    """Removes bool[layers, channels, members] from live entries; returns paths that change."""
    changed_paths = set()
    for member_index, path, positions, entries in _list_members(group, live):
        if removable[..., member_index].any():
            for layer, row in zip(entries, removable[..., member_index], strict=True):
                layer[positions[row].reshape(-1)] = False
            changed_paths.add(path)
    return changed_paths
