"""Fixtures that replace the function which decides what searches for masks."""

import jax
import pytest

from sparsity.core import host
from sparsity.selection import cpu, search, topk
from sparsity.selection.cpu import sorting


def _with(name):
    select = search.select_by_counting if name == "portable" else cpu.select_by_rows
    with pytest.MonkeyPatch.context() as patch:
        if name != "numpy":
            patch.setattr(host, "find_host_device", lambda *args: None)
        patch.setattr(topk, "choose_search", lambda leaves: select)
        patch.setattr(sorting, "MAX_SORTED", 2**18 if name == "sorted" else 0)
        jax.clear_caches()
        yield name
    jax.clear_caches()


@pytest.fixture(scope="module", params=["portable", "cpu"])
def both_searches(request):
    """The portable search, then that for hosts, which sorts nothing, however small."""
    yield from _with(request.param)


@pytest.fixture(scope="module", params=["portable", "cpu", "sorted", "numpy"])
def every_search(request):
    """The same, then that for hosts, which sorts all, then that by numpy."""
    yield from _with(request.param)
