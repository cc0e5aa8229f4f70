"""Selection of sharded scores on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import KINDS, run

pytestmark = pytest.mark.slow


@KINDS
def test_sharded_scores_are_selected_where_they_are(kind):
    run("selection", kind)
