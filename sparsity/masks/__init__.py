"""Masks of one tensor: made from scores, updated by drop and grow, packed to bits, applied."""

from sparsity.masks.create import (
    TopkFn,
    apply_mask,
    apply_mask_straight_through,
    check_type,
    create_mask,
    drop_and_grow,
    mask_shapes,
    pack,
    packed_shape,
    unpack,
)

__all__ = [
    "TopkFn",
    "apply_mask",
    "apply_mask_straight_through",
    "check_type",
    "create_mask",
    "drop_and_grow",
    "mask_shapes",
    "pack",
    "packed_shape",
    "unpack",
]
