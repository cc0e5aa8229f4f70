"""Fixtures that several test modules share."""

import pytest

from sparsity import api


@pytest.fixture
def registry(monkeypatch):
    """The registry of algorithms, restored after the test."""
    copied = dict(api.ALGORITHM_REGISTRY)
    monkeypatch.setattr(api, "ALGORITHM_REGISTRY", copied)
    return copied
