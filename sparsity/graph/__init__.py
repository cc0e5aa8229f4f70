"""Queries about a traced model, in any framework: uses of weights, costs, coupled channels.

`trace` reads the program of a model as a `Model`, and makes a `Graph` of analyses of the program.
Each analysis answers one question, is made from the `Model` and analyses below it in this list, and
imports only from these:

- `graph.py`: how many multiply-adds and bytes does the model need, with masks or without channels?
- `depth.py`: which branches and layers may go as a whole?
- `removal.py`: why may a channel be removed?
- `kinds.py`: what are the channels: hidden units, heads, a stream, experts?
- `coupling.py`, `groups.py`: which entries are removed together with a channel?
- `affine.py`: by which numbers is a parameter multiplied before a product reads it?
- `readers.py`: what do products add to the outputs of a parameter, which patterns fit its inputs?
- `uses.py`: which products read a parameter, along which of its axes?

Pruners and distributions ask a `Graph`: `coupled.py` holds `Coupled`, `budgets.py` holds `budget`.
"""

from sparsity.graph.budgets import Budget as Budget, budget as budget
from sparsity.graph.coupled import Coupled as Coupled
from sparsity.graph.graph import Graph as Graph, trace as trace
from sparsity.graph.groups import ChannelGroup as ChannelGroup, Refusal as Refusal
from sparsity.graph.readers import Bias as Bias
from sparsity.graph.traced_model import Parameter as Parameter
from sparsity.graph.uses import Use as Use, View as View
