"""Selection of sharded scores, as on a platform that is no host."""

from unittest import mock

import jax

from sparsity.selection import search, topk
from tests.scripts.selection import (
    CASES as _CASES,
    groups_are_selected_where_they_are,
    hash_scores_shard_without_communication,
)

_WITHOUT_SEARCH = groups_are_selected_where_they_are, hash_scores_shard_without_communication


def by_the_portable_search(devices):
    jax.clear_caches()
    with mock.patch.object(topk, "choose_search", return_value=search.select_by_counting):
        for case in _CASES["Explicit" if devices.is_explicit else "Auto"]:
            if case not in _WITHOUT_SEARCH:
                case(devices)
    jax.clear_caches()


CASES = {kind: [by_the_portable_search] for kind in _CASES}
