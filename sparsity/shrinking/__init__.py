"""Models that become smaller: channels that masks leave dead are removed for real.

`shrink` takes three steps: `dead.find_dead` proves which channels masks leave dead, `plan_cut`
writes the indices that stay as a `Plan`, and `shrink` takes these indices of the parameters, the
masks and the optimizer's state. `Plan.apply` runs the traced program at the smaller sizes, by
`CutInterpreter`.
"""

from sparsity.shrinking.plan import Plan as Plan
from sparsity.shrinking.shrink import Small as Small, shrink as shrink
