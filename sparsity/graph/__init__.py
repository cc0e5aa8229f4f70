"""Queries about a traced model, in any framework: uses of weights, costs, coupled channels.

`trace` reads the program of a model as a `Model`, and makes a `Graph` of analyses of the program.
Each analysis answers one question, is made from the `Model` and analyses below it in this list, and
imports only from these:

- `costs.py`: how many multiply-adds and bytes does the model need, with masks or without channels?
- `removal/`: why may a channel be removed?
- `channels/`: which entries are removed together with a channel?
- `readers/`: which products read a parameter, along which of its axes?

Pruners and distributions ask a `Graph`: `scope/` holds `Coupled`, `budgets.py` holds `budget`.
"""

from sparsity.graph.budgets import Budget as Budget, budget as budget
from sparsity.graph.channels.groups import ChannelGroup as ChannelGroup, Refusal as Refusal
from sparsity.graph.coupled import Coupled as Coupled
from sparsity.graph.graph import Graph as Graph
from sparsity.graph.readers.biases import Bias as Bias
from sparsity.graph.readers.uses import Use as Use
from sparsity.graph.readers.views import View as View
from sparsity.graph.trace import trace as trace
from sparsity.graph.traced_model import Parameter as Parameter
