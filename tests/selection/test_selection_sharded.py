"""Selection of sharded scores on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import KINDS, run

pytestmark = pytest.mark.slow


@KINDS
@pytest.mark.parametrize("program", ["selection", "portable_selection"])
def test_sharded_scores_are_selected_where_they_are(program, kind):
    run(program, kind)
