"""Training step of a wrapped optimizer, and the state of the optimizer.

The files in the order of a first reading:

1. What a user meets: `base_updater` (`instant_sparsify`, `wrap_optax`) and `state` (`SparseState`).
2. What an algorithm overrides: `updater_hooks` (fields, class attributes and hooks), `hooks` (their
   arguments and calls) and `overrides` (what an override changes).
3. The step: `step` (its phases), `masked_step` (the optimizer sees complete parameters), `regrow`
   (weights that return start from zero) and `skip` (steps that leave the optimizer as it is).
4. The step with a state of kept entries: `kept_step` and `kept_state` (arrays of kept entries).
5. Errors and warnings: `field_checks`, `kept_checks`, `step_checks`, `hook_results`,
   `idle_training` and `frozen` (parameters that the optimizer never moves stay dense); and
   `field_equality`, for updaters as static arguments of compiled functions.
"""
