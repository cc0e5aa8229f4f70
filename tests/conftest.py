"""Settings of all tests, and fixtures that several test modules share."""

import os

# Most of the time of the tests is LLVM's; the optimized HLO does not depend on this.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import jax
import pytest

from sparsity import api

pytest.register_assert_rewrite("tests.helpers")


@pytest.fixture
def registry():
    """The registry of algorithms, restored after the test."""
    saved = dict(api.ALGORITHM_REGISTRY)
    yield api.ALGORITHM_REGISTRY
    api.ALGORITHM_REGISTRY.clear()
    api.ALGORITHM_REGISTRY.update(saved)


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Frees the programs of a module: each maps memory, and a process may map only so much."""
    yield
    jax.clear_caches()
