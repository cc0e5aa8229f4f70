"""Fixtures that say how masks are found: by a search, or by sorting what is small."""

import jax
import pytest

from sparsity.selection.cpu import sorting


def _with(most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "MOST", most)
        jax.clear_caches()
        yield


@pytest.fixture(scope="module")
def searched():
    """Nothing is sorted, however small."""
    yield from _with(0)


@pytest.fixture(scope="module", params=[0, 2**18], ids=["searched", "sorted"])
def both_ways(request):
    """All is searched, then all is sorted."""
    yield from _with(request.param)
