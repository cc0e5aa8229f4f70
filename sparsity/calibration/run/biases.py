"""Biases that take over the means of lost outputs in a run, for a refit that shifts biases."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.trees import Path
from sparsity.graph import Bias, Graph
from sparsity.masks import Site


def find_run_biases(graph: Graph, sites: Mapping[Path, Site]) -> dict[Path, Bias]:
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
    return places


def _holds_outputs(graph: Graph, path: Path, bias: Bias) -> bool:
    """Returns whether a bias can hold outputs: a real one would lose their imaginary parts."""
    outputs = [use.equation.outputs[0].dtype for use in graph.traced.tracker.find_products(path)]
    if not any(jnp.issubdtype(x, jnp.complexfloating) for x in outputs):
        return True
    (dtype,) = (param.dtype for param in graph.leaves if param.path == bias.path)
    return jnp.issubdtype(dtype, jnp.complexfloating)
