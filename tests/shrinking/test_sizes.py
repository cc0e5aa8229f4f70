"""How much is left of known networks when half of every group of channels is removed."""

import math

import numpy as np
import pytest

from sparsity import trace
from sparsity.shrinking.plan import plan_of
from tests.graph import models


def halved(model):
    """Parameters, those that are left, and the share of multiply-adds, from shapes alone."""
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    plan = plan_of(graph, {group.variable: np.arange(group.size // 2) for group in graph.groups})
    whole = left = 0
    for leaf in graph.leaves:
        if leaf.path[-1] in ("mean", "var"):  # statistics, which are not trained
            continue
        kept = plan.kept.get(leaf.path, {})
        whole += leaf.size
        left += math.prod(len(kept[i]) if i in kept else n for i, n in enumerate(leaf.shape))
    macs = graph.macs_left({group.variable: group.size // 2 for group in graph.groups})
    return whole, left, macs / graph.macs()


def test_half_of_every_group_of_resnet_18():
    whole, left, _ = halved(models.resnet((2, 2, 2, 2), False))
    assert (whole, left) == (11_689_512, 3_055_880)


def test_half_of_every_group_of_resnet_50_is_a_quarter_of_its_multiply_adds():
    whole, left, macs = halved(models.resnet((3, 4, 6, 3), True))
    # A quarter of all but the stem and the head: 2048 x 1000 + 1000 becomes 1024 x 1000 + 1000.
    assert (whole, left) == (25_557_032, 6_917_640)
    assert macs == pytest.approx(0.257, abs=0.001)
