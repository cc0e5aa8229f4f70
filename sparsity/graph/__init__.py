"""Queries about a traced model, in any framework: uses of weights, costs, coupled channels."""

from sparsity.graph.budgets import Budget, budget
from sparsity.graph.channels.groups import ChannelGroup, Refusal
from sparsity.graph.graph import Graph
from sparsity.graph.model import Parameter
from sparsity.graph.readers.biases import Bias
from sparsity.graph.readers.uses import Use
from sparsity.graph.readers.views import View
from sparsity.graph.scope.coupled import Coupled
from sparsity.graph.trace import trace

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
