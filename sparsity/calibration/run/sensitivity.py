"""Errors of a model by pruned layer and rate, and the best rates for a sparsity."""

from __future__ import annotations

from collections.abc import Mapping

from sparsity.calibration.rates import Rates
from sparsity.core import trees
from sparsity.core.checks import check_fraction
from sparsity.core.trees import Params, Path


class Sensitivity(dict[Path, dict[float, float]]):
    """Errors {path: {rate: error}} of the model's outputs if one parameter is pruned at a rate."""

    def distribution(self, params: Params, sparsity: float) -> Rates:
        """Returns the distribution of that mean whose errors have the smallest sum.

        Errors between two rates are interpolated, on the lower convex hull of each curve from 0 on;
        errors of several parameters are taken to add up.

        Args:
          params: tree of parameters, for their sizes.
          sparsity: mean over the weights of all measured parameters.

        Raises:
          ValueError: the mean cannot be reached with the rates that were measured, or a measured
            parameter is missing.

        Example:
          >>> import jax.numpy as jnp
          >>> params = {"robust": jnp.ones((4, 4)), "fragile": jnp.ones((4, 4))}
          >>> errors = Sensitivity({("robust",): {0.8: 0.1}, ("fragile",): {0.4: 0.1, 0.8: 0.5}})
          >>> rates = errors.distribution(params, sparsity=0.5)(params)
          >>> {name: round(rate, 3) for name, rate in rates.items()}
          {'fragile': 0.2, 'robust': 0.8}
        """
        check_fraction("sparsity", sparsity)
        sizes = {path: param.size for path, param in trees.leaves_by_names(params).items()}
        if not self or not all(curve and path in sizes for path, curve in self.items()):
            measured, params = (
                trees.listed([trees.join_names(path) for path in x]) for x in (self, sizes)
            )
            raise ValueError(
                f"Errors were measured of {measured}; each needs a rate and one of the params, "
                f"{params}."
            )
        total = sum(sizes[path] for path in self)
        remaining = sparsity * total  # weights that are still to be removed
        highest = sum(max(curve) * sizes[path] for path, curve in self.items()) / total
        if sparsity > highest:
            raise ValueError(
                f"sparsity = {sparsity} is above the mean {highest:.4f} of the highest rates that "
                "were measured. Measure higher rates."
            )
        pieces = [  # of the hulls: error by weight, weights, parameter
            (rise / sizes[path], width * sizes[path], path)
            for path, curve in self.items()
            for rise, width in _list_hull_pieces(curve)
        ]
        rates = dict.fromkeys(self, 0.0)
        for _, count, path in sorted(pieces):  # the pieces of a parameter become steeper
            rates[path] += min(count, remaining) / sizes[path]
            remaining -= min(count, remaining)
        return Rates(rates)


def _list_hull_pieces(curve: Mapping[float, float]) -> list[tuple[float, float]]:
    """Returns (slope, width) of the pieces of a curve's lower convex hull, from no error at 0."""
    points, end = [(0.0, 0.0), *sorted(curve.items())], 0
    pieces = []
    while end < len(points) - 1:
        rate, error = points[end]
        slopes = [(e - error) / (r - rate) for r, e in points[end + 1 :]]
        slope = min(slopes)
        end += 1 + max(i for i, other in enumerate(slopes) if other == slope)
        pieces.append((slope, points[end][0] - rate))
    return pieces
