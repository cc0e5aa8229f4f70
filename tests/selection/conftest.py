"""Fixtures that replace the function which decides what searches for masks."""

import jax
import pytest

from sparsity.selection import cpu
from sparsity.selection.cpu import sorting


def _with(search):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "is_supported", lambda leaves: search != "portable")
        patch.setattr(sorting, "MAX_SORTED", 2**18 if search == "sorted" else 0)
        jax.clear_caches()
        yield search
    jax.clear_caches()


@pytest.fixture(scope="module", params=["portable", "cpu"])
def search(request):
    """The portable search, then that for hosts, which sorts nothing, however small."""
    yield from _with(request.param)


@pytest.fixture(scope="module", params=["portable", "cpu", "sorted"])
def every_search(request):
    """The same, then that for hosts, which sorts all."""
    yield from _with(request.param)
