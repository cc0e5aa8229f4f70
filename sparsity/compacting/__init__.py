"""Models whose masked parameters are stored, multiplied and trained as their kept values.

- `compact` builds a `Compact`, by `building`.
- `stored_model` runs the program of a model by `densifier`, and `dense_read` makes a parameter
  dense there.
- `formats` says how the kept values of a parameter lie in memory, and multiplies them.
- `moving` moves masks; `optimizer_state` cuts moments down to kept values.
- `table` and `tune` describe a model and measure its formats.
"""

from sparsity.compacting.compact import Compact as Compact, compact as compact
from sparsity.compacting.formats.grouped_products import grouped_product as grouped_product
