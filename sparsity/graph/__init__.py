"""What a model does with every weight, in any framework: uses, costs, and coupled channels."""

from sparsity.graph.budgets import Budget, budget
from sparsity.graph.channels import ChannelGroup, Leaf, Refusal
from sparsity.graph.coupled import Coupled
from sparsity.graph.graph import Graph
from sparsity.graph.trace import trace
from sparsity.graph.uses import Use, View

__all__ = [
    "Budget",
    "ChannelGroup",
    "Coupled",
    "Graph",
    "Leaf",
    "Refusal",
    "Use",
    "View",
    "budget",
    "trace",
]
