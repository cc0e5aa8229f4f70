"""Models whose masked parameters are stored, multiplied and trained as their kept values.

- `compact` builds a `Compact`, which runs the program of a model by `densifier`.
- `formats` and `grouped` say how the kept values of a parameter lie in memory, and multiply them.
- `moving` moves masks; `state` cuts the moments of an optimizer down to kept values.
- `table` describes a model and measures its formats.
"""

from sparsity.compacting.compact import Compact as Compact, compact as compact
from sparsity.compacting.grouped_products import grouped_product as grouped_product
