"""Parameters that are solved together, by their inputs in one model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sparsity.calibration.run.task import PrunedLayer, PruningTask
from sparsity.calibration.run.weights import ModelWeights
from sparsity.calibration.statistics.capture import Calibration, calibrate, collect
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.summing import Steps
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Graph


class JointSolver:
    """Solves parameters by their inputs in the model of the present weights.

    Args:
      task: what the run prunes.
      weights: current parameters.
      fn: the model.
      batches: the batches.
      paths: paths of the parameters.
    """

    def __init__(
        self,
        task: PruningTask,
        weights: ModelWeights,
        fn: Callable[..., PyTree],
        batches: Sequence[PyTree],
        paths: Sequence[Path],
    ) -> None:
        self._task, self._weights, self._paths = task, weights, paths
        self._model = fn, weights.tree(), batches

    def solve(self, path: Path) -> PrunedLayer:
        """Returns a pruned parameter."""
        return self._solve(path) if self._task.needs.has_grams else self._with_losses[path]

    def _solve(self, path: Path) -> PrunedLayer:
        return self._task.solve(self._weights, path, (), self._statistics.get(path))

    def _is_solved(self, path: Path, _: object) -> bool:
        return path in self._paths

    @functools.cached_property
    def _statistics(self) -> dict[Path, Statistic]:
        return calibrate(*self._model, self._task.needs.statistics_kind, self._is_solved)

    @functools.cached_property
    def _with_losses(self) -> dict[Path, PrunedLayer]:
        """All parameters, with their losses from one run of the model."""
        layers = {path: self._solve(path) for path in self._paths}
        matrices = {path: each.matrices() for path, each in layers.items()}

        def make(graph: Graph) -> Calibration:
            return Calibration(graph, self._task.needs.statistics_kind, self._is_solved)

        calibration, sums = collect(*self._model, make, _sum_losses, matrices, stacks=False)
        total = dict.fromkeys(self._paths, jnp.zeros(()))
        for number, each in sums.items():
            total[calibration.uses[number].path] += each
        return {path: each._replace(losses=total[path]) for path, each in layers.items()}


def _sum_losses(
    calibration: Calibration, number: int, x: jax.Array, steps: Steps, matrices: PyTree
) -> jax.Array:
    """Returns the sums of |y|^2 over the outputs of a use by matrices, a list by path."""
    use = calibration.uses[number]
    layer = tuple(steps[scan] for scan in use.view.scans)
    return calibration.sum_outputs(number, x, steps, [each[layer] for each in matrices[use.path]])
