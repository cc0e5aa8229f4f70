"""Training step of a wrapped optimizer, and the state of the optimizer.

The files in the order of a first reading:

1. `base_updater` and `state`: what a user meets (`instant_sparsify`, `wrap_optax`, `SparseState`).
2. `hooks`: what an algorithm overrides, and how a step calls it.
3. `step`: the phases of a step; `inner`: the optimizer that it runs, of complete parameters or of
   kept entries.
4. `checks`: errors and warnings.
"""
