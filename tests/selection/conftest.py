"""A fixture that replaces how the search lays out parameters, or by numpy does without it."""

import jax
import pytest

from sparsity.selection import search, topk


@pytest.fixture(scope="module", params=["rows", "shapes", "host"])
def every_search(request):
    """Selection by numpy; by a compiled search in rows; by one that moves no entry."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "host":
            patch.setattr(topk, "is_on_host", lambda all_candidates: False)
        if request.param == "shapes":
            patch.setattr(search, "_MAX_JOINED", 0)
        jax.clear_caches()
        yield request.param
    jax.clear_caches()
