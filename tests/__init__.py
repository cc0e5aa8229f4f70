"""Tests of the package; every process of theirs collects garbage less often."""

import gc

gc.set_threshold(20_000, 20, 20)  # imports and traces make many objects, and few cycles
