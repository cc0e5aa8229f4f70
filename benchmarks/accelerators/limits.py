"""Limits of what algorithms add to a step of adam, which `bash run.sh` checks."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of the attributes of `Figures` of the same names; `None`: no limit.

    An ordinary step launches at most 12 kernels more, which move 2.5 bytes a weight, unless a case
    says otherwise.
    """

    temporaries: float
    update_kernels: float | None = None
    update_moved: float | None = None
    kernels: float | None = 12
    moved: float | None = 2.5
    collectives: float | None = 64
    update_collectives: float | None = 64


# (device, tree, layout, algorithm): limits. A TPU launches kernels that copy small arrays to and
# from the memory of its core: kernels of its updates are not limited. For 256 chips XLA adds up a
# count by an array with a number of each chip.
LIMITS = {
    ("H100", "two", "replicated", "static_sparse"): Limits(0.1),
    ("H100", "two", "replicated", "magnitude"): Limits(6.1, 200, 110),
    ("H100", "two", "replicated", "saliency"): Limits(6.1, 200, 110),
    ("H100", "two", "replicated", "global_magnitude"): Limits(6.1, 200, 120),
    ("H100", "two", "replicated", "set"): Limits(9, 400, 230),
    ("H100", "two", "replicated", "rigl"): Limits(9, 400, 230),
    ("H100", "two", "replicated", "lamp"): Limits(13),
    ("H100", "two", "replicated", "srigl"): Limits(16),
    ("H100", "two", "replicated", "magnitude_ste"): Limits(3, 200, 110, kernels=200, moved=110),
    ("H100", "two", "replicated", "magnitude_ste, stored"): Limits(7, 200, 110, moved=9),
    ("H100", "ResNet-50", "replicated", "magnitude"): Limits(6.1, 200, 110),
    ("H100", "ResNet-50", "replicated", "rigl"): Limits(9, 400, 230),
    ("8 H100", "two", "first", "magnitude"): Limits(6.1, 250, 110),
    ("8 H100", "two", "last, Explicit", "rigl"): Limits(9, 510, 230),
    ("v5e", "two", "replicated", "static_sparse"): Limits(0.1, kernels=20),
    ("v5e", "two", "replicated", "magnitude"): Limits(6, None, 110, kernels=20),
    ("v5e", "two", "replicated", "set"): Limits(9, None, 230, kernels=20),
    ("v5e", "two", "replicated", "rigl"): Limits(9, None, 230, kernels=20),
    ("v5e", "two", "replicated", "srigl"): Limits(16, kernels=20, moved=3),
    ("8 v5e", "two", "first", "magnitude"): Limits(6, None, 110, kernels=None),
    ("8 v5e", "two", "first", "rigl"): Limits(9, None, 230, kernels=None),
    ("256 v5e", "two", "last", "magnitude"): Limits(
        12, None, 110, kernels=None, update_collectives=512
    ),
}
