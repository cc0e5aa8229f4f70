"""N of every M: which are kept, and how a ramp comes to them."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.patterns import nm
from sparsity.sparsity_types import NByM
from tests.masks.mask_oracles import by_slice, draw, expected_slice

NAN = float("nan")


GROUPS = [
    ((8,), NByM(2, 4), 0),
    ((3, 8), NByM(2, 4), 0),
    ((8, 3), NByM(1, 4, axis=0), 0),
    ((8, 3), NByM(3, 8, axis=-2), 0),
    ((2, 6, 3), NByM(1, 3, axis=1), 0),
    ((4, 8, 3), NByM(2, 4, axis=0), 1),
    ((4, 3, 8), NByM(2, 4, axis=-1), 1),
    ((3, 8), NByM(0, 4), 0),
    ((3, 8), NByM(4, 4), 0),
]


@pytest.mark.parametrize(("shape", "kind", "batch_axes"), GROUPS, ids=str)
def test_n_of_every_m_are_kept(shape, kind, batch_axes):
    scores = np.random.default_rng(1).integers(-3, 3, shape).astype(np.float32)
    scores.flat[2] = NAN
    mask = kind.select(scores, 0.5, batch_axes=batch_axes)
    expected = by_slice(expected_slice, batch_axes, [scores], 0.5, kind)
    assert mask.dtype == jnp.uint8
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(("sparsity", "kept"), [(0.0, 8), (1e-6, 4), (0.1, 4), (0.9, 4), (1.0, 4)])
def test_any_sparsity_above_zero_selects_n_of_m(sparsity, kept):
    assert int(NByM(2, 4).select(draw(8), sparsity).sum()) == kept
    traced = jax.jit(lambda s: NByM(2, 4).select(draw(8), s))(sparsity)
    assert int(traced.sum()) == kept


@pytest.mark.slow
@pytest.mark.parametrize("m", range(1, 17))
def test_a_ramp_ends_at_exactly_n_of_m(m, monkeypatch):
    # What is asked of the selection, which would have to be compiled for every m.
    monkeypatch.setattr(nm.selection, "nm_mask", lambda scores, n, m, axis: (int(n), m))
    for n in range(m + 1):
        target = 1 - n / m if n < m else 0.5
        for sparsity in (np.float32(target), jnp.float32(target), target):
            asked = NByM(n, m).select(draw(m), sparsity, target=jnp.float32(target))
            assert asked == (n, m)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.1, 0.7, 1.0, 1e-3])
def test_a_ramp_ends_at_exactly_n_of_m_whatever_the_target(target):
    for n in (0, 1, 5, 12, 15):
        assert int(NByM(n, 16).select(draw(16), target, target=target).sum()) == n


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 7), (0, 6), (7, 16)])
def test_a_ramp_keeps_what_its_formula_says(n, m):
    scores = draw(m)
    target = np.float32(1 - n / m)
    for sparsity in np.linspace(0, target, 15, dtype=np.float32):
        reached = Fraction(float(sparsity)) / Fraction(float(target))
        exact = m * (1 - reached * (1 - Fraction(n, m)))
        if 0 < abs(exact - round(exact)) < Fraction(1, 100_000):
            continue  # float32 may round it either way
        mask = NByM(n, m).select(scores, sparsity, target=target)
        assert int(mask.sum()) == max(n, math.ceil(exact))


def test_a_ramp_has_the_counts_worked_by_hand():
    # 2:4 on the way to 0.5: none removed, then one from half of the way, two at its end.
    counts = {0.0: 4, 0.1: 4, 0.2499: 4, 0.25: 3, 0.49: 3, 0.5: 2}
    make = lambda s, t: NByM(2, 4).select(np.arange(4.0), s, target=t)  # noqa: E731
    compiled = jax.jit(make)
    for sparsity, count in counts.items():
        assert int(make(sparsity, 0.5).sum()) == count
        assert int(compiled(sparsity, 0.5).sum()) == count


def test_a_ramp_towards_zero_stays_dense():
    assert int(NByM(2, 4).select(draw(8), 0.0, target=jnp.float32(0)).sum()) == 8


@pytest.mark.slow
def test_a_ramp_is_nested():
    scores, kept = draw((5, 16)), np.ones((5, 16))
    for sparsity in np.linspace(0, 0.75, 13):
        mask = np.asarray(NByM(4, 16).select(scores, sparsity, target=0.75))
        assert np.all(mask <= kept)
        kept = mask
