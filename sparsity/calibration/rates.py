"""Sparsities of layers: by the statistics of their inputs, or by the errors of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.calibration.statistics.validation import check_statistic
from sparsity.core import trees
from sparsity.core.arrays import promote
from sparsity.core.checks import (
    check_fraction,
    check_fractions,
    check_function,
    check_kind,
    check_number,
    check_values,
)
from sparsity.core.names import suggest
from sparsity.core.trees import Params, Path, Sparsities
from sparsity.masks.distributions import FilterFn


@dataclasses.dataclass(frozen=True)
class Rates:
    """Distribution that gives each named parameter its sparsity; others stay dense.

    Attributes:
      sparsities: by path, in [0, 1]: one number, or an array of one for each slice of a stack.

    Raises:
      ValueError: a path is no tuple, or a sparsity is out of range; the error names the path.
    """

    sparsities: Mapping[Path, chex.Numeric]

    def __post_init__(self) -> None:
        check_kind("sparsities", self.sparsities, Mapping, "a dict {path: sparsity}")
        for path, sparsity in self.sparsities.items():
            if not isinstance(path, tuple):
                raise ValueError(
                    "Give each path of Rates as a tuple of names, such as ('layer', 'kernel'), got "
                    f"{path!r}."
                )
            check_fractions(f"the sparsity of {trees.join_names(path)!r}", sparsity)

    def __call__(self, params: Params) -> Sparsities:
        """Returns a tree like `params` of sparsities, `None` for parameters that stay dense.

        Raises:
          ValueError: a path is that of no parameter.
        """
        paths = set(map(trees.path_names, trees.covered_paths(params)))
        missing = [path for path in self.sparsities if not trees.is_within(path, paths)]
        if unknown := list(map(trees.join_names, missing)):
            names = map(trees.join_names, trees.leaves_by_names(params))
            raise ValueError(
                f"Rates has a sparsity for {trees.listed(unknown)}, which is no parameter. "
                f"{suggest(unknown[0], names)}"
            )
        return trees.map_matched(
            lambda path, _: self.sparsities.get(trees.path_names(path)), params
        )


def owl(
    statistics: Statistics,
    params: Params,
    sparsity: float = 0.6,
    *,
    filter_fn: FilterFn | None = None,
    threshold: float = 5.0,
    spread: float = 0.08,
) -> Rates:
    """Returns a `sparsity_distribution_fn` that removes less from layers with many outliers.

    The outliers of a layer are its scores |weight| x norm of the input above `threshold` times the
    mean score. The sparsity of a layer falls with its share of outliers: the smallest and the
    largest share are 2 x `spread` apart, and the mean over all weights is `sparsity`. In the paper
    a layer is a block of a transformer; here it is a parameter, or a slice of a stack.

    Args:
      statistics: `{path: Statistic}`; parameters without one stay dense.
      params: tree of parameters.
      sparsity: mean over the weights of all these parameters, in [0, 1].
      filter_fn: `filter_fn(path, param) -> bool` selects among the parameters with a statistic.
      threshold: M of the paper.
      spread: lambda of the paper.

    Raises:
      ValueError: a statistic has no parameter or does not fit it, nothing is selected, or a
        sparsity would leave [0, 1].

    Source: Yin et al. 2023, "Outlier Weighed Layerwise Sparsity (OWL)", section 3.

    Example:
      >>> def seen(squares):
      ...     return Statistic(squares=jnp.array(squares), count=9, contracting=(0,), output=(1,))
      >>> params = {"even": jnp.ones((8, 4)), "outlier": jnp.ones((8, 4))}
      >>> statistics = {("even",): seen([1.0] * 8), ("outlier",): seen([1.0] * 7 + [400.0])}
      >>> rates = owl(statistics, params, sparsity=0.6)(params)
      >>> {name: round(rate, 2) for name, rate in rates.items()}
      {'even': 0.68, 'outlier': 0.52}
    """
    check_values("sparsity", sparsity, "Call owl outside of jit.")
    check_fraction("sparsity", sparsity)
    check_number("threshold", threshold, 0)
    check_number("spread", spread, 0)
    leaves = _select_leaves(statistics, params, filter_fn)
    shares = jax.device_get(
        [_measure_outliers(param, statistics[path], threshold) for path, param in leaves.items()]
    )
    low, high = (float(f([f(x) for x in shares])) for f in (np.min, np.max))
    scaled_shares = [(x - low) / ((high - low) or 1.0) for x in shares]
    mean = np.average([x.mean() for x in scaled_shares], weights=[x.size for x in leaves.values()])
    rates: dict[Path, chex.Numeric] = {}
    for path, share in zip(leaves, scaled_shares, strict=True):
        rate = np.asarray(sparsity - 2 * spread * (share - mean))
        if not np.all((rate >= 0) & (rate <= 1)):
            raise ValueError(
                f"owl gives {trees.join_names(path)!r} the sparsity {rate}, outside [0, 1], at "
                f"sparsity = {sparsity}, spread = {spread}. Lower the spread."
            )
        rates[path] = rate if rate.ndim else float(rate)
    return Rates(rates)


def _select_leaves(
    statistics: Statistics, params: Params, filter_fn: FilterFn | None
) -> dict[Path, jax.Array]:
    """Returns the selected parameters by path, checked against their statistics."""
    check_kind("statistics", statistics, Mapping, "a dict {path: Statistic}")
    check_function("filter_fn", filter_fn, "(path, param)", optional=True)
    check_values("params", params, "Call owl outside of jit.")
    params_by_names = trees.leaves_by_names(params)
    leaves = {path: param for path, param in params_by_names.items() if trees.is_array(param)}
    if unknown := [trees.join_names(path) for path in statistics if path not in leaves]:
        raise ValueError(
            f"The statistics have entries for {trees.listed(unknown)}, where the params have no "
            "array. Both must be of the same model."
        )
    selected = {
        path: leaves[path]
        for path in statistics
        if filter_fn is None or filter_fn(path, leaves[path])
    }
    if not selected:
        raise ValueError("owl: filter_fn selects no parameter that has a statistic.")
    for path, param in selected.items():
        check_statistic(statistics[path], param.shape, trees.join_names(path))
    return selected


@jax.jit
def _measure_outliers(param: jax.Array, statistic: Statistic, threshold: float) -> jax.Array:
    """Returns D of each slice: the share of scores above `threshold` times their mean."""
    squares, param = statistic.sums_of_squares(), statistic.scale_weights(param)
    weights = jnp.abs(statistic.to_matrices(param))
    weights = weights.astype(promote(weights.dtype, squares.dtype))
    scores = weights * jnp.sqrt(squares)[..., None, :]  # A
    mean = jnp.mean(scores, axis=(-2, -1), keepdims=True)
    # A_ij > M mean(A)
    return jnp.mean(scores > threshold * mean, axis=(-2, -1), dtype=jnp.float32)


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
