"""Mask updates of compact models, slice by slice.

- `update.py` runs one update: `move_masks`, the body of `Compact.move`.
- `make_mask_updates.py` checks that an updater keeps the number of values, and makes a `MaskUpdate`
  for each parameter.
- `mask_update.py` finds the new positions of a parameter, one slice after the other.
- `gradients.py` does this within the backward pass of a loss, where the gradient of a slice exists.
- `carry.py` takes values and moments to the new positions.
"""
