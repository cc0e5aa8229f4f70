"""Settings of all tests, and fixtures that several test modules share."""

import gc

import tests.environment  # noqa: F401 isort: skip (before jax)

import pytest

from sparsity import api
from tests.lowering import share_contexts
from tests.memory import free_programs

pytest.register_assert_rewrite("tests.helpers")
share_contexts()


collect_ignore = ["typing"]  # programs of users, for checkers of types

# The files that take longest start first, so that no worker waits for another in the end.
LONGEST = (
    "test_meshes", "test_colabs", "test_kills", "test_matrix", "test_docs", "test_baselines",
    "test_move", "test_compact_state", "test_fuzz", "test_mnist_compact", "test_examples",
    "test_trees", "test_checkpoints", "test_compacting_on_meshes", "test_selection_sharded",
    "test_shrinking_on_meshes", "test_mnist_shrinking", "test_selection",
    "test_benchmarks", "test_optimizers", "test_competition", "test_typing", "test_prune",
    "test_processes", "test_random_networks",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish():
    """Spares garbage collections the modules and tests, which stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def registries():
    """The registries of configurations, restored after the test."""
    tables = api.ALGORITHM_REGISTRY, api.SCHEDULES, api.SCOPES, api.DISTRIBUTIONS
    saved = [dict(table) for table in tables]
    yield tables
    for table, entries in zip(tables, saved, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def registry(registries):
    """The registry of algorithms, restored after the test."""
    return registries[0]


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    yield
    free_programs(max_maps=25_000)
