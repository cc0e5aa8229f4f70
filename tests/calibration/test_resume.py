"""An interrupted one-shot run goes on from the layers that are finished."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import Report
from tests import helpers

PRUNER = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
PARAMS = {
    "layers": jax.random.normal(jax.random.key(0), (2, 8, 8), jnp.bfloat16),
    "last": jax.random.normal(jax.random.key(1), (8, 3)),
}
BATCHES = [jax.random.normal(jax.random.key(i), (10, 8)) for i in (2, 3)]


def model(params, x):
    x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
    return x @ params["last"]


class Refit:
    """Halves what stays; the user interrupts it before a layer."""

    def __init__(self, interrupted_at=None):
        self.calls, self.interrupted_at = 0, interrupted_at

    def __call__(self, dense, pruned, mask, statistic, select):
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls += 1
        return pruned / 2, mask


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [True, False])
def test_a_run_goes_on_where_it_was_interrupted_with_the_same_bits(tmp_path, sequential):
    def run(refit, folder=None):
        return sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, refit, sequential, folder)

    expected = run(Refit())
    with pytest.raises(KeyboardInterrupt):
        run(Refit(interrupted_at=1), tmp_path / "run")
    refit = Refit()
    found = run(refit, tmp_path / "run")
    assert refit.calls == (2 if sequential else 1)  # a scan is pruned layer by layer, or as a whole
    for own, other in zip(*map(jax.tree.leaves, (found[:2], expected[:2])), strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)
    again = run(Refit(interrupted_at=0), tmp_path / "run")  # all is finished
    assert again[2] == found[2]
    assert isinstance(again[2], Report)
    assert [row.error for row in found[2].values()] == [row.error for row in expected[2].values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"batches": BATCHES[::-1]}, "'batches'"),
        ({"params": PARAMS | {"last": PARAMS["last"] * 2}}, "'params'"),
        ({"fn": lambda params, x: model(params, x) * 3}, "'fn'"),
        ({"refit": sparsity.ADMM()}, "'refit'"),
        ({"sequential": False}, "'sequential'"),
        ({"pruner": sparsity.WandaPruning(sparsity_distribution_fn=helpers.uniform(0.6))}, "'sp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_of_another_run_is_refused(tmp_path, changed, named):
    one = {"pruner": PRUNER, "fn": model, "params": PARAMS, "batches": BATCHES}
    with pytest.raises(KeyboardInterrupt):
        sparsity.oneshot(**one, refit=Refit(interrupted_at=0), folder=tmp_path)
    changed = one | {"refit": Refit(interrupted_at=0)} | changed
    with pytest.raises(ValueError, match=f"holds another run: its {named}.*differ.*Give another"):
        sparsity.oneshot(**changed, folder=tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other files"):
        sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path)
