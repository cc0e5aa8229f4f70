"""Queries about a traced model, in any framework: uses of weights, costs, coupled channels."""

from sparsity.graph.biases import Bias
from sparsity.graph.budgets import Budget, budget
from sparsity.graph.channels import ChannelGroup, Parameter, Refusal
from sparsity.graph.coupled import Coupled
from sparsity.graph.graph import Graph
from sparsity.graph.trace import trace
from sparsity.graph.uses import Use
from sparsity.graph.views import View

__all__ = [
    "Bias",
    "Budget",
    "ChannelGroup",
    "Coupled",
    "Graph",
    "Parameter",
    "Refusal",
    "Use",
    "View",
    "budget",
    "trace",
]
