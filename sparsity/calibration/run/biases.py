"""Biases that take over the means of lost outputs in a run, for a refit that shifts biases."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sparsity.calibration.refits import shift_bias
from sparsity.calibration.run.pruned_layer import PrunedLayer
from sparsity.calibration.run.weights import LayerIndex, ModelWeights
from sparsity.core import trees
from sparsity.core.trees import Path
from sparsity.graph import Bias, Graph
from sparsity.masks import Site


@dataclasses.dataclass(frozen=True)
class Biases:
    """Biases of the parameters to prune; none unless the refit shifts biases.

    Attributes:
      graph: the graph of the model.
      places: by path of the parameter.
    """

    graph: Graph
    places: Mapping[Path, Bias] = dataclasses.field(default_factory=dict)

    def find(self, path: Path, index: LayerIndex) -> tuple[Path, LayerIndex] | None:
        """Returns the bias of a parameter, and its layer of the same number."""
        if path not in self.places:
            return None
        place = self.places[path].path
        axes = self.graph.traced.tracker.find_scanned_axes().get(place, ())
        return place, tuple((axis, layer) for axis, (_, layer) in zip(axes, index, strict=False))

    def shift(
        self, path: Path, bias: jax.Array, layer: PrunedLayer, weights: ModelWeights
    ) -> jax.Array:
        """Returns the bias of a parameter that keeps the means of its outputs."""
        read = self.graph.traced.model.reader(weights.by_path())
        lost = layer.dense, layer.refitted, layer.statistic
        return shift_bias(self.places[path], bias, *lost, read)


def find_run_biases(graph: Graph, sites: Mapping[Path, Site]) -> Biases:
    """Returns the biases of the parameters to prune, and warns of parameters without one."""
    biases = {path: graph.traced.biases[path] for path in sites if path in graph.traced.biases}
    places = {path: bias for path, bias in biases.items() if _holds_outputs(graph, path, bias)}
    if missing := [site.name for path, site in sites.items() if path not in places]:
        warnings.warn(
            f"Means leaves {trees.listed(missing, len(missing))} as the pruner does: the model "
            "adds no bias of their own to their outputs. A BatchNorm in inference mode serves if "
            "its running mean or its shift is among the params.",
            stacklevel=4,
        )
    return Biases(graph, places)


def _holds_outputs(graph: Graph, path: Path, bias: Bias) -> bool:
    """Returns whether a bias can hold outputs: a real one would lose their imaginary parts."""
    outputs = [use.equation.outputs[0].dtype for use in graph.traced.tracker.find_products(path)]
    if not any(jnp.issubdtype(x, jnp.complexfloating) for x in outputs):
        return True
    (dtype,) = (param.dtype for param in graph.leaves if param.path == bias.path)
    return jnp.issubdtype(dtype, jnp.complexfloating)
