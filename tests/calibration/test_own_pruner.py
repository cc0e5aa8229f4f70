"""A pruner of one's own: `solve` gets checked statistics; masks, dtypes and packing are settled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.calibration import ScoredPruning, StatisticsPruning
from sparsity.calibration.statistics import validation
from tests import helpers


@dataclasses.dataclass
class Scaled(StatisticsPruning):
    """Keeps the weights of the largest w^2 x square of the input, twice as large."""

    statistics_kind = "squares"
    factor: float = 2.0

    def solve(self, site, param, statistic, target):
        squares = statistic.sums_of_squares()[..., None, :]
        scores = statistic.from_matrices(statistic.to_matrices(param) ** 2 * squares, param.shape)
        mask = site.pattern.select(scores, target, batch_axes=site.batch_axes)
        return self.factor * param.astype(jnp.float32), mask > 0


def model(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


PARAMS = {
    "up": jnp.array([[1.0, -4.0], [2.0, 3.0]]),
    "down": jnp.array([[1.0], [2.0]]),
    "bias": jnp.ones(1),
}
X = jnp.array([[3.0, 0.0], [0.0, 1.0]])  # squares 9 and 1: scores 9, 144, 4, 9 of `up`


def test_solve_gets_one_parameter_after_the_other_and_the_rest_stays():
    pruner = Scaled(sparsity_distribution_fn=sparsity.Uniform(0.5))
    statistics = sparsity.calibrate(model, PARAMS, [X])
    pruned, masks = pruner.instant_sparsify(PARAMS, statistics=statistics)
    np.testing.assert_array_equal(masks["up"], [[1, 1], [0, 0]])
    np.testing.assert_array_equal(pruned["up"], [[2, -8], [0, 0]])
    hidden = np.tanh(X @ PARAMS["up"])
    kept = np.argmax((np.asarray(PARAMS["down"]).T * hidden**2).sum(0) * [1, 2])
    assert np.flatnonzero(masks["down"]) == [kept]
    np.testing.assert_array_equal(pruned["bias"], [1])
    assert masks["bias"] is None


def test_masks_are_packed_and_weights_keep_their_dtype():
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)
    statistics = sparsity.calibrate(model, PARAMS, [X])
    pruner = Scaled(sparsity_distribution_fn=sparsity.Uniform(0.5), use_packed_masks=True)
    pruned, masks = pruner.instant_sparsify(params, statistics=statistics)
    assert pruned["up"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(pruned["up"], [[2, -8], [0, 0]])
    np.testing.assert_array_equal(sparsity.unpack_masks(masks, params)["up"], [[1, 1], [0, 0]])


def test_oneshot_calibrates_what_the_class_states_and_solves_layer_by_layer():
    pruner = Scaled(sparsity_distribution_fn=sparsity.Uniform(0.5))
    pruned, _, report = sparsity.oneshot(pruner, model, PARAMS, [X])
    np.testing.assert_array_equal(pruned["up"], [[2, -8], [0, 0]])
    hidden = np.tanh(np.asarray(X) @ [[2, -8], [0, 0]])  # of the pruned layer
    kept = np.argmax((np.asarray(PARAMS["down"]) ** 2).T * (hidden**2).sum(0))
    assert np.flatnonzero(pruned["down"]) == [kept]
    assert list(report) == [("up",), ("down",)]


def test_slices_of_a_stack_are_solved_with_their_own_statistics():
    stack = jnp.array([[[1.0], [2.0]], [[1.0], [2.0]]])
    seen = sparsity.Statistic(
        squares=jnp.array([[9.0, 1.0], [1.0, 1.0]]),
        count=2,
        batch=(0,),
        contracting=(1,),
        output=(2,),
    )
    pruner = Scaled(sparsity_distribution_fn=helpers.half, batch_axes=1)
    pruned = pruner.instant_sparsify(stack, statistics={(): seen})[0]
    np.testing.assert_array_equal(pruned[..., 0], [[2, 0], [0, 4]])


def test_an_empty_parameter_is_not_solved():
    seen = sparsity.Statistic(squares=jnp.ones(3), count=2, contracting=(0,), output=(1,))
    pruner = Scaled(sparsity_distribution_fn=helpers.half)
    pruned, masks = pruner.instant_sparsify(jnp.ones((3, 0)), statistics={(): seen})
    assert pruned.shape == masks.shape == (3, 0)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda w: (w, jnp.ones(3)), r"each of shape \(2, 1\), got \(\(2, 1\), \(3,\)\)"),
        (lambda w: (w.T, w), r"each of shape \(2, 1\), got \(\(1, 2\), \(2, 1\)\)"),
        (lambda w: w, r"each of shape \(2, 1\), got one array of shape \(2, 1\)\."),
        (lambda w: (w + 1j, w), "with floating weights.* got weights of complex64"),
        (lambda w: (w.astype(int), w), "with floating weights.* got weights of int32"),
    ],
)
def test_solutions_of_other_shapes_or_kinds_are_refused_by_name(returned, got):
    class Returning(StatisticsPruning):
        def solve(self, site, param, statistic, target):
            return returned(param)

    seen = sparsity.Statistic(gram=jnp.eye(2), count=9, contracting=(0,), output=(1,))
    pruner = Returning(sparsity_distribution_fn=helpers.half)
    message = rf"Returning\.solve must return \(weights, mask\) of 'params'.* {got}"
    with pytest.raises(ValueError, match=message):
        pruner.instant_sparsify(jnp.ones((2, 1)), statistics={(): seen})


TREE = {"up": jnp.ones((2, 1)), "bias": jnp.ones(1)}
MASKS = {"up": jnp.ones((2, 1), jnp.uint8), "bias": None}
SEEN = {("up",): sparsity.Statistic(gram=jnp.eye(2), count=9, contracting=(0,), output=(1,))}

BAD_BIAS = jnp.array([jnp.nan])
BIAS = {("bias",): sparsity.Statistic(gram=jnp.eye(1), count=9, contracting=(0,), output=())}


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, r"must return \(params, masks\), got None"),
        (TREE, r"must return \(params, masks\), got \{'bias'"),
        ((TREE | {"more": 1.0}, MASKS), "they differ at 'more'"),
        (({"up": TREE["up"]}, MASKS), "they differ at 'bias'"),
        ((TREE | {"up": jnp.ones((2, 1), int)}, MASKS), "of 'up' with floating .* of int32"),
        ((TREE | {"up": TREE["up"] + 1j}, MASKS), "of 'up' with floating .* of complex64"),
        ((TREE | {"up": jnp.ones((1, 2))}, MASKS), r"of 'up', each of shape \(2, 1\), .*\(1, 2\)"),
        ((TREE | {"bias": jnp.ones(3)}, MASKS), r"of 'bias', each of shape \(1,\), .*\(3,\)"),
        ((TREE, MASKS | {"up": MASKS["up"] * 1j}), "'up' among the masks of .* got complex64"),
    ],
)
@pytest.mark.parametrize("hook", ["solve_tree", "instant_sparsify"])
def test_trees_of_a_hook_are_checked_by_the_name_of_hook_and_parameter(hook, returned, got):
    class Returning(StatisticsPruning):
        """Returns something else from a hook."""

    setattr(Returning, hook, lambda self, *args, **kwargs: returned)
    pruner = Returning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match=got) as error:
        sparsity.calibration.prune(pruner, TREE, SEEN)
    assert f"Returning.{hook}" in str(error.value)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("hook", "names"), [("solve", ["up"]), ("solve_tree", ["bias", "up"])])
def test_all_weights_that_a_hook_may_change_are_read_and_no_others(monkeypatch, hook, names, copy):
    class Returning(StatisticsPruning):
        def solve(self, site, param, statistic, target):
            return jnp.array(param, copy=copy), jnp.ones(param.shape, jnp.uint8)

    if hook == "solve_tree":
        copied = jax.tree.map(lambda x: jnp.array(x, copy=copy), TREE)
        Returning.solve_tree = lambda *args: (copied, MASKS)
    shapes = []
    monkeypatch.setattr(validation, "is_finite", lambda x: shapes.append(x.shape) or True)
    pruner = Returning(sparsity_distribution_fn=helpers.half)
    pruner.instant_sparsify(TREE, statistics=SEEN)
    assert shapes[1:] == [TREE[name].shape for name in names]  # after the statistic


def test_an_assigned_solve_tree_may_change_all_weights_which_are_read():
    class Assigned(StatisticsPruning):
        """Overrides no hook in the class."""

    pruner = Assigned(sparsity_distribution_fn=helpers.half)
    pruner.solve_tree = lambda params, targets, problems: (params | {"bias": BAD_BIAS}, MASKS)
    with pytest.raises(ValueError, match=r"Assigned\.solve_tree must return finite .*'bias'"):
        pruner.instant_sparsify(TREE, statistics=SEEN)


def test_a_tree_of_ones_own_gets_the_dtypes_of_the_params_and_needs_each_mask(monkeypatch):
    class Returning(StatisticsPruning):
        masks = MASKS

        def solve_tree(self, params, targets, problems):
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), self.masks

    pruner = Returning(sparsity_distribution_fn=helpers.half)
    pruned, _ = pruner.instant_sparsify(TREE, statistics=SEEN)
    assert {x.dtype.name for x in jax.tree.leaves(pruned)} == {"float32"}
    not_finite = TREE | {"up": jnp.array([[1.0], [jnp.nan]])}
    monkeypatch.setattr(Returning, "solve_tree", lambda *args: (not_finite, MASKS))
    with pytest.raises(ValueError, match=r"Returning\.solve_tree must return finite weights of"):
        pruner.instant_sparsify(TREE, statistics=SEEN)
    monkeypatch.undo()
    Returning.masks = MASKS | {"up": None}
    with pytest.raises(ValueError, match=r"Returning\.solve_tree must return a mask of 'up', got"):
        pruner.instant_sparsify(TREE, statistics=SEEN)


@pytest.mark.parametrize(
    ("paths", "got"),
    [
        (None, "must be a list or an iterator"),
        ([("up",)], r"must return key paths .* got \('up',\)"),
        ([(jax.tree_util.DictKey("bias"),)], "names 'bias', which has no sparsity"),
    ],
)
def test_paths_of_ones_own_are_key_paths(paths, got):
    class Returning(StatisticsPruning):
        def calibrated_paths(self, params, targets):
            return paths

    pruner = Returning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match=rf"Returning\.calibrated_paths {got}"):
        pruner.instant_sparsify(TREE, statistics=SEEN | BIAS)


@pytest.mark.parametrize(
    ("score", "got"),
    [
        (lambda weights: None, "an array of real numbers, got .* = None"),
        (lambda weights: weights[0], r"have shape \(1, 2\), got .* = \(2,\)"),
        (lambda weights: weights * 1j, "an array of real numbers, got .*complex64"),
    ],
)
def test_scores_of_ones_own_are_checked_by_the_name_of_their_parameter(score, got):
    class Returning(ScoredPruning):
        def score(self, weights, squares):
            return score(weights)

    pruner = Returning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match=rf"Returning\.score of 'up' must .*{got}"):
        pruner.instant_sparsify(TREE, statistics=SEEN)


def test_what_no_hook_can_do_is_refused_by_name():
    options = {"sparsity_distribution_fn": helpers.half}
    seen = {(): sparsity.Statistic(gram=jnp.eye(2), count=9, contracting=(0,), output=(1,))}
    with pytest.raises(NotImplementedError, match="StatisticsPruning must override solve"):
        StatisticsPruning(**options).instant_sparsify(jnp.ones((2, 1)), statistics=seen)
    with pytest.raises(
        ValueError, match=r"Scaled solves each parameter by itself.*got scope = Glo"
    ):
        Scaled(scope=sparsity.Global(), **options)
    with pytest.raises(ValueError, match=r"Scaled solves each .*and topk_fn = None, got .*lambda"):
        Scaled(topk_fn=lambda scores, sparsity: scores > 0, **options)
    with pytest.raises(ValueError, match=r"Scaled changes weights when it prunes.*OneShotSchedule"):
        Scaled(scheduler=sparsity.OneShotSchedule(3), **options)
    squares = sparsity.Statistic(squares=jnp.ones(2), count=9, contracting=(0,), output=(1,))
    with pytest.raises(ValueError, match=r"StatisticsPruning needs the Gram matrix of 'params'"):
        StatisticsPruning(**options).instant_sparsify(jnp.ones((2, 1)), statistics={(): squares})


class Inputs(ScoredPruning):
    def score(self, weights, squares):
        return weights**0 * squares


def test_a_score_of_ones_own_follows_global_scopes_and_extra_arguments_reach_its_hooks():
    seen = {
        (name,): sparsity.Statistic(squares=squares, count=9, contracting=(0,), output=(1,))
        for name, squares in (("a", jnp.array([1.0, 2.0])), ("b", jnp.array([3.0, 4.0])))
    }
    params = {"a": jnp.ones((2, 1)), "b": jnp.ones((2, 1))}

    class Boosted(Inputs):
        def calculate_scores(self, params, sparse_state=None, grads=None, statistics=None, boost=1):
            scores = super().calculate_scores(params, sparse_state, grads, statistics)
            return scores | {"a": scores["a"] * boost}

    scope = sparsity.Global(use_normalization=False)
    pruner = Boosted(scope=scope, sparsity_distribution_fn=helpers.half)
    masks = pruner.instant_sparsify(params, statistics=seen)[1]
    assert [int(masks[name].sum()) for name in "ab"] == [0, 2]
    masks = pruner.instant_sparsify(params, statistics=seen, boost=9)[1]
    assert [int(masks[name].sum()) for name in "ab"] == [2, 0]


def test_an_override_of_solve_tree_may_pass_on_every_argument():
    class Counted(Scaled):
        def solve_tree(self, *args, **kwargs):
            self.kwargs = kwargs
            return super().solve_tree(*args, **kwargs)

    x = sparsity.Statistic(squares=jnp.ones(4), count=9, contracting=(0,), output=(1,))
    pruner = Counted(sparsity_distribution_fn=helpers.half)
    pruner.instant_sparsify(jnp.ones((4, 2)), statistics={(): x}, boost=9)
    assert pruner.kwargs == {"grads": None, "boost": 9}


def test_assigned_fields_are_checked_as_the_constructor_checks_them():
    pruner = sparsity.SparseGPTPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    pruner.scheduler = sparsity.PeriodicSchedule(3)
    with pytest.raises(ValueError, match="SparseGPTPruning changes weights when it prunes"):
        pruner.wrap_optax(optax.sgd(0.1))
    pruner = dataclasses.replace(pruner, scheduler=sparsity.NoUpdateSchedule())
    pruner.scope = sparsity.Global()
    with pytest.raises(ValueError, match=r"needs scope = Layerwise\(\)"):
        pruner.instant_sparsify(jnp.ones((2, 1)), statistics={})
    pruner = sparsity.SparseGPTPruning()
    pruner.damping = -1.0
    with pytest.raises(ValueError, match="damping"):
        pruner.instant_sparsify(jnp.ones((2, 1)), statistics={})


def test_the_inputs_of_a_layer_are_rounded_to_bfloat16_between_equations():
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 48), "down": (48, 8), "x": (64, 32)}
    up, down, x = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes.values())
    squares = {}

    class Recording(StatisticsPruning):
        statistics_kind = "squares"

        def solve(self, site, param, statistic, target):
            squares[param.shape] = np.asarray(statistic.sums_of_squares())
            return param, jnp.ones(param.shape, jnp.uint8)

    def normalize(h):
        h = h - h.mean(axis=-1, keepdims=True)
        return h / jnp.sqrt((h * h).mean(axis=-1, keepdims=True) + 1e-3)

    def run(params, x):
        return normalize(x @ params["up"]) @ params["down"]

    pruner = Recording(sparsity_distribution_fn=sparsity.Uniform(0.5))
    sparsity.oneshot(pruner, run, {"up": up, "down": down}, [x])
    hidden = np.asarray(normalize(x @ up), np.float32)  # each operation is a program of its own
    np.testing.assert_allclose(squares[48, 8], np.square(hidden).sum(axis=0), rtol=1e-5)
