"""Scopes: what competes with what, counted exactly, against an oracle in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.core import trees
from sparsity.masks import Layerwise as LayerwiseScope, ScoredSite
from tests.helpers import num_kept

_SIZES = {"a": (6, 8), "b": (4, 6), "c": (10, 8)}
_ALL = 48 + 24 + 80


def _params(seed=0, scales=(1, 1, 1), dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape) * scale, dtype)
        for (name, shape), scale in zip(_SIZES.items(), scales, strict=True)
    }


def _normalized(params):
    """|w| / (norm + 1e-8), the norm in float64 and the rest in float32."""
    scores = {}
    for name, w in params.items():
        w = np.asarray(w.astype(jnp.float32))
        norm = np.float32(np.sqrt(np.sum(w.astype(np.float64) ** 2)))
        scores[name] = np.abs(w) / (norm + np.float32(1e-8))
    return scores


def _best(scores, kept):
    """Masks of the highest scores; ties go to the first leaf and, in it, to the lowest index."""
    flat = np.concatenate([np.ravel(score) for score in scores.values()]).astype(np.float64)
    flat = np.where(np.isnan(flat), -np.inf, flat)
    mask = np.zeros(flat.size, np.uint8)
    mask[np.argsort(-flat, kind="stable")[:kept]] = 1
    cuts = np.cumsum([score.size for score in scores.values()])[:-1]
    parts = np.split(mask, cuts)
    return {name: p.reshape(s.shape) for p, (name, s) in zip(parts, scores.items(), strict=True)}


def _check(masks, expected):
    for name, mask in expected.items():
        np.testing.assert_array_equal(masks[name], mask, err_msg=name)


def _counts(masks):
    return {name: int(mask.sum()) for name, mask in masks.items() if mask is not None}


def _make(cls, targets=0.5, scope=None, **options):
    if not callable(targets):
        targets = sparsity.Uniform(targets)
    scope = sparsity.Global() if scope is None else scope
    return cls(sparsity_distribution_fn=targets, scope=scope, **options)


def test_each_leaf_by_itself_is_the_default():
    assert sparsity.MagnitudePruning().scope == sparsity.Layerwise()
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    masks = pruner.instant_sparsify(_params(scales=(1, 100, 1)))[1]
    assert _counts(masks) == {"a": 24, "b": 12, "c": 40}


# Which weights stay.


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_the_highest_normalized_scores_of_all_leaves_stay(share):
    params = _params(scales=(1, 5, 0.1))
    masks = _make(sparsity.MagnitudePruning, share).instant_sparsify(params)[1]
    _check(masks, _best(_normalized(params), num_kept(_ALL, share)))


@pytest.mark.parametrize("scales", [(1e30, 1e30, 1), (1e-30, 1e-30, 1e-30), (1e30, 1e-30, 1)])
def test_norms_of_huge_and_tiny_weights_neither_overflow_nor_vanish(scales):
    params = _params(scales=scales)
    masks = _make(sparsity.MagnitudePruning, 0.5).instant_sparsify(params)[1]
    _check(masks, _best(_normalized(params), _ALL // 2))


def test_weights_of_bfloat16_are_ranked_in_float32():
    params = _params(dtype=jnp.bfloat16) | {"b": _params()["b"]}
    masks = _make(sparsity.MagnitudePruning, 0.6).instant_sparsify(params)[1]
    _check(masks, _best(_normalized(params), num_kept(_ALL, 0.6)))


def test_ties_go_to_the_lowest_index_of_the_first_leaf():
    rng = np.random.default_rng(3)
    params = {
        name: jnp.asarray(rng.integers(1, 4, shape), jnp.float32) for name, shape in _SIZES.items()
    }
    scope = sparsity.Global(use_normalization=False)
    masks = _make(sparsity.MagnitudePruning, 0.5, scope).instant_sparsify(params)[1]
    _check(masks, _best({k: np.asarray(v) for k, v in params.items()}, _ALL // 2))


@pytest.mark.slow
def test_nan_ranks_lowest_and_infinity_highest():
    params = _params()
    scores = {name: np.abs(np.asarray(leaf)) for name, leaf in params.items()}
    scores["a"][0, :] = np.nan
    scores["c"][1, 2:5] = np.inf
    updater = _make(sparsity.MagnitudePruning, scope=sparsity.Global(use_normalization=False))
    masks = updater.create_masks(jax.tree.map(jnp.asarray, scores), dict.fromkeys(_SIZES, 0.75))
    assert not masks["a"][0].any()
    assert masks["c"][1, 2:5].all()
    _check(masks, _best(scores, _ALL // 4))
    # Normalized, the other scores are as they would be without them.
    masks = _make(sparsity.MagnitudePruning).create_masks(
        jax.tree.map(jnp.asarray, scores), dict.fromkeys(_SIZES, 0.75)
    )
    finite = {k: jnp.where(jnp.isfinite(v), v, 0) for k, v in scores.items()}
    expected = _normalized(finite)
    expected["a"][0, :], expected["c"][1, 2:5] = np.nan, np.inf
    _check(masks, _best(expected, _ALL // 4))


# Normalization.


@pytest.mark.parametrize("cls", [sparsity.GlobalMagnitudePruning, sparsity.GlobalSaliencyPruning])
def test_global_pruners_compare_layers_of_different_scales(cls):
    params, grads = _params(), _params(seed=1)
    scaled = params | {"b": params["b"] * 1000}
    masks = {
        normalize: [
            cls(sparsity=0.5, use_normalization=normalize).instant_sparsify(tree, grads)[1]
            for tree in (params, scaled)
        ]
        for normalize in (True, False)
    }
    _check(masks[True][1], masks[True][0])
    assert _counts(masks[False][1])["b"] > _counts(masks[False][0])["b"]
    assert sum(_counts(masks[False][1]).values()) == _ALL // 2
    _check(cls(sparsity=0.5).instant_sparsify(scaled, grads)[1], masks[True][1])


def test_the_epsilon_of_the_norm_counts():
    params = _params(scales=(1, 1, 0.01))
    scope = sparsity.Global(normalization_eps=1e6)  # as good as no normalization
    masks = _make(sparsity.MagnitudePruning, 0.5, scope).instant_sparsify(params)[1]
    plain = {name: np.abs(np.asarray(leaf)) for name, leaf in params.items()}
    _check(masks, _best(plain, _ALL // 2))
    assert _counts(masks)["c"] < 10  # of 80, all of them small


@pytest.mark.slow
def test_integer_scores_are_not_normalized():
    draws = [
        _make(sparsity.RandomPruning, 0.5, sparsity.Global(use_normalization=normalize))
        for normalize in (True, False)
    ]
    masks = [draw.instant_sparsify(_params())[1] for draw in draws]
    _check(masks[0], masks[1])
    assert sum(_counts(masks[0]).values()) == _ALL // 2


# How many weights stay.

_TRAINERS = {
    "magnitude": sparsity.MagnitudePruning,
    "random": sparsity.RandomPruning,
    "saliency": sparsity.SaliencyPruning,
    "ste": sparsity.SteMagnitudePruning,
    "static": sparsity.StaticRandomSparse,
    "set": sparsity.SET,
    "rigl": sparsity.RigL,
}


def _make_masks(cls, targets):
    params, grads = _params(), _params(seed=1)
    updater = _make(cls, targets, scheduler=sparsity.PeriodicSchedule(2))
    if issubclass(cls, sparsity.StaticRandomSparse | sparsity.SET | sparsity.RigL):
        return updater.init_state(params).masks
    return updater.instant_sparsify(params, grads)[1]


@pytest.mark.parametrize("name", _TRAINERS)
def test_totals_are_exact_for_every_algorithm(name):
    cls = _TRAINERS[name]
    # All at one sparsity: as many as of all weights, 152 * 0.35 = 53.2; alone 17 + 8 + 28.
    assert sum(_counts(_make_masks(cls, 0.65)).values()) == 53
    # Different sparsities: 48 * 0.9 = 43.2, 24 * 0.45 = 10.8, 80 * 0.13 = 10.4.
    targets = {"a": 0.1, "b": 0.55, "c": 0.87}
    counts = _counts(_make_masks(cls, lambda params: targets))
    assert sum(counts.values()) == 43 + 11 + 10
    assert counts != {"a": 43, "b": 11, "c": 10}


def test_equal_targets_count_all_weights_and_not_each_leaf():
    # 0.99 leaves 1.52 of 152; leaf by leaf 48, 24 and 80 would keep one each.
    assert sum(_counts(_make_masks(sparsity.MagnitudePruning, 0.99)).values()) == 2


def test_erk_targets_leave_what_the_layers_would_keep():
    targets = sparsity.ERK(0.6)
    each = targets(_params())
    expected_total = sum(num_kept(np.prod(_SIZES[name]), each[name]) for name in _SIZES)
    assert len(set(each.values())) == 3
    for cls in (sparsity.MagnitudePruning, sparsity.RigL):
        assert sum(_counts(_make_masks(cls, targets)).values()) == expected_total


@pytest.mark.slow
@pytest.mark.parametrize("name", _TRAINERS)
def test_a_leaf_of_its_own_sparsity_keeps_exactly_that(name):
    targets = sparsity.Uniform(0.5, custom_sparsity_map={"b": 0.25})
    counts = _counts(_make_masks(_TRAINERS[name], targets))
    assert counts["b"] == 18
    assert counts["a"] + counts["c"] == 64


@pytest.mark.slow
def test_the_own_sparsity_of_a_global_pruner_may_have_a_structure():
    pruner = sparsity.GlobalMagnitudePruning(
        sparsity=0.5,
        custom_sparsity_map={"b": 0.5},
        sparsity_type=lambda path, param: (
            sparsity.Channel(0) if path == ("b",) else sparsity.Unstructured()
        ),
    )
    masks = pruner.instant_sparsify(_params())[1]
    assert sorted(np.asarray(masks["b"]).sum(axis=1)) == [0, 0, 6, 6]
    assert _counts(masks)["a"] + _counts(masks)["c"] == 64


# Masks that move.


def _moving(cls, **options):
    return _make(cls, 0.5, scheduler=sparsity.PeriodicSchedule(2), **options)


def _grads(params, step):
    """Gradients that are larger in one layer than in the others."""
    large = {"a": 1.0, "b": 100.0, "c": 0.01}
    return jax.tree.map(lambda p, s: s * jnp.cos(p * 7 + step), params, large)


def _scanned(tx, params, state):
    def body(carry, step):
        params, state = carry
        updates, state = tx.update(_grads(params, step), state, params)
        return (optax.apply_updates(params, updates), state), state.masks

    return jax.lax.scan(body, (params, state), jnp.arange(11))[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "jit", "scan"])
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_totals_stay_while_layers_trade(cls, way):
    tx = _moving(cls).wrap_optax(optax.sgd(0.01))
    params = _params()
    state = tx.init(params)
    history = [_counts(state.masks)]
    if way == "scan":  # six updates of masks in eleven steps
        masks = jax.jit(lambda *args: _scanned(tx, *args))(params, state)
        history += [_counts({k: m[i] for k, m in masks.items()}) for i in range(0, 11, 2)]
    else:
        update = jax.jit(tx.update) if way == "jit" else tx.update
        for step in range(6):
            updates, state = update(_grads(params, step), state, params)
            params = optax.apply_updates(params, updates)
            history.append(_counts(state.masks))
            state = state._replace(count=state.count + 1)
    assert [sum(counts.values()) for counts in history] == [_ALL // 2] * 7
    assert len({tuple(counts.values()) for counts in history}) > 1


@pytest.mark.slow
def test_rigl_moves_weights_to_the_layer_of_the_largest_gradients():
    tx = _moving(sparsity.RigL).wrap_optax(optax.sgd(0.0))
    params = _params()
    state = tx.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, moved = tx.update(zero | {"b": jnp.ones((4, 6))}, state, params)
    # 76 active, of which round(76 * 0.7) = 53 stay and 23 grow, first where gradients are.
    assert _counts(moved.masks)["b"] == 24
    assert sum(_counts(moved.masks).values()) == 76


@pytest.mark.slow
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_a_leaf_of_its_own_sparsity_keeps_that_while_masks_move(cls):
    targets = sparsity.Uniform(0.5, custom_sparsity_map={"b": 0.25})
    tx = _make(cls, targets, scheduler=sparsity.PeriodicSchedule(1), skip_gradients=False)
    tx = tx.wrap_optax(optax.sgd(0.01))
    params = _params()
    state = tx.init(params)
    for step in range(3):
        _, state = tx.update(_grads(params, step), state, params)
        counts = _counts(state.masks)
        assert counts["b"] == 18
        assert counts["a"] + counts["c"] == 64


# What cannot be ranked globally.


@pytest.mark.parametrize(
    "kind",
    [sparsity.NByM(2, 4), sparsity.Block((2, 2)), sparsity.Channel(), sparsity.FanIn()],
    ids=repr,
)
def test_structured_types_are_refused(kind):
    with pytest.raises(ValueError, match=r"ranks single weights.*got sparsity_type = \w+\("):
        _make(sparsity.MagnitudePruning, sparsity_type=kind)
    with pytest.raises(ValueError, match="ranks single weights"):
        sparsity.GlobalMagnitudePruning(sparsity=0.5, sparsity_type=kind)
    pruner = _make(sparsity.RigL, sparsity_type=lambda path, param: kind)
    with pytest.raises(ValueError, match="ranks single weights") as error:
        pruner.init_state({"layer": {"kernel": jnp.ones((4, 8))}})
    assert "'layer/kernel'" in str(error.value)


def test_a_selection_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="needs topk_fn = None"):
        _make(sparsity.MagnitudePruning, topk_fn=lambda scores, share: scores > 0)


def test_batch_axes_are_refused():
    with pytest.raises(ValueError, match="batch_axes must be 0, got batch_axes = 1"):
        _make(sparsity.MagnitudePruning, batch_axes=1)
    pruner = _make(sparsity.SET, batch_axes=lambda path, param: 1)
    with pytest.raises(ValueError, match=r"'layer/kernel'.*got batch_axes = 1"):
        pruner.init_state({"layer": {"kernel": jnp.ones((2, 4, 8))}})


def test_what_does_not_fit_is_found_at_init_by_pruners_too():
    pruner = _make(
        sparsity.MagnitudePruning,
        sparsity_type=lambda path, param: sparsity.Channel(),
        scheduler=sparsity.OneShotSchedule(100),
    )
    with pytest.raises(ValueError, match="'layer/kernel'"):
        pruner.wrap_optax(optax.sgd(0.1)).init({"layer": {"kernel": jnp.ones((4, 8))}})


@pytest.mark.parametrize("scope", [sparsity.Global, "global", None, object()])
def test_what_is_no_scope_is_an_error_that_names_those_there_are(scope):
    with pytest.raises(ValueError, match=r"scope must be a scope such as.*Global\("):
        sparsity.MagnitudePruning(scope=scope)


# A scope of one's own.


@dataclasses.dataclass(frozen=True)
class FirstServed:
    """All that stays is in the first leaves, by the order of the tree."""

    def check(self, pattern, batch_axes, topk_fn):
        if batch_axes:
            raise ValueError("no stacks here")

    def select(self, leaves, topk_fn):
        assert all(isinstance(leaf, ScoredSite) for leaf in leaves)
        remaining = sum(round(leaf.scores.size * (1 - float(leaf.sparsity))) for leaf in leaves)
        masks = []
        for leaf in leaves:
            count = min(remaining, leaf.scores.size)
            order = jnp.arange(leaf.scores.size).reshape(leaf.scores.shape)
            masks.append((order < count).astype(jnp.uint8))
            remaining -= count
        return masks

    def move(self, leaves, drop_fraction):
        return [1 - leaf.mask for leaf in leaves]


@pytest.mark.slow
def test_a_scope_of_ones_own_selects_and_moves():
    with pytest.raises(ValueError, match="no stacks here"):
        _make(sparsity.MagnitudePruning, scope=FirstServed(), batch_axes=1)
    masks = _make(sparsity.MagnitudePruning, scope=FirstServed()).instant_sparsify(_params())[1]
    assert _counts(masks) == {"a": 48, "b": 24, "c": 4}
    tx = _moving(sparsity.RigL, scope=None)
    tx = dataclasses.replace(tx, scope=FirstServed()).wrap_optax(optax.sgd(0.1))
    params = _params()
    state = tx.init(params)
    assert _counts(state.masks) == {"a": 48, "b": 24, "c": 4}
    _, state = tx.update(params, state, params)
    assert _counts(state.masks) == {"a": 0, "b": 0, "c": 76}


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "must return a list of masks, one for each of 3 parameters, got None"),
        ([jnp.ones(3)], "must return a list of masks, one for each of 3 parameters, got "),
        ([None] * 3, "the mask of 'a' by Returning.select must be an array of real numbers"),
    ],
)
def test_masks_of_a_scope_of_ones_own_are_checked(returned, got):
    class Returning(FirstServed):
        def select(self, leaves, topk_fn):
            return returned

    with pytest.raises(ValueError, match=got):
        _make(sparsity.MagnitudePruning, scope=Returning()).instant_sparsify(_params())


def test_layerwise_is_the_scope_at_the_top():
    assert sparsity.Layerwise is LayerwiseScope


class Above(sparsity.Layerwise):
    """Keeps what is at least half of the largest score of a leaf."""

    def select(self, leaves, topk_fn):
        return [(x.scores >= jnp.max(x.scores) / 2).astype(jnp.uint8) for x in leaves]


def test_a_select_of_a_subclass_gets_arrays_in_a_step():
    pruner = sparsity.MagnitudePruning(
        scope=Above(),
        scheduler=sparsity.OneShotSchedule(0),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
    )
    params = jnp.array([[1.0, -4.0], [3.0, 2.0]])
    tx = pruner.wrap_optax(optax.sgd(0.1))
    state = tx.update(jnp.zeros_like(params), tx.init(params), params)[1]
    np.testing.assert_array_equal(state.masks, [[0, 1], [1, 1]])


class Reversed(sparsity.Layerwise):
    """Ranks by other scores, which the record takes in the place of its own."""

    def select(self, leaves, topk_fn):
        return super().select([x._replace(scores=-x.scores) for x in leaves], topk_fn)


@dataclasses.dataclass(frozen=True)
class Everything:
    """Says which parameters get masks, and sees the scores of all of them."""

    def check(self, pattern, batch_axes, topk_fn):
        pass

    def bind(self, sites, targets):
        return self

    def masked_paths(self, params, sparsities):
        return set(trees.leaves_by_path(params))

    def select_tree(self, scores, sparsities):
        return jax.tree.map(lambda x: (x > 2).astype(jnp.uint8), scores)

    def move_tree(self, masks, drop, grow, drop_fraction):
        return jax.tree.map(lambda x: (x > 2).astype(jnp.uint8), grow)


@pytest.mark.parametrize(
    ("cls", "scope", "expected"),
    [
        (sparsity.MagnitudePruning, Reversed(), [[1, 0], [0, 1]]),
        (sparsity.MagnitudePruning, Everything(), [[0, 1], [1, 0]]),
        (sparsity.RigL, Everything(), [[0, 1], [1, 0]]),
    ],
    ids=["replaced", "tree", "moved"],
)
def test_scopes_read_scores_as_arrays(cls, scope, expected):
    updater = cls(
        scope=scope,
        scheduler=sparsity.OneShotSchedule(0),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
    )
    params = jnp.array([[1.0, -4.0], [3.0, 2.0]])
    ones = jnp.ones((2, 2), jnp.uint8)
    tx = updater.wrap_optax(optax.sgd(0.1), masks=ones)
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    np.testing.assert_array_equal(state.masks, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_leaves_of_different_dtypes_compete_by_the_values_of_their_scores(compiled):
    rng = np.random.default_rng(0)
    dtypes = {"a": jnp.bfloat16, "b": jnp.float32, "c": jnp.float16}
    params = {name: jnp.asarray(rng.normal(size=(4, 8)), dtype) for name, dtype in dtypes.items()}
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Global(use_normalization=False),
        sparsity_distribution_fn=sparsity.Uniform(0.75),
    )
    create = jax.jit(pruner.instant_sparsify) if compiled else pruner.instant_sparsify
    _, masks = create(params)
    scores = {name: np.abs(np.asarray(x, np.float32)) for name, x in params.items()}
    threshold = np.sort(np.concatenate([x.ravel() for x in scores.values()]))[-24]
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask, scores[name] >= threshold)


@pytest.mark.parametrize(
    "pruner",
    [
        sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5)),
        sparsity.RandomPruning(sparsity_distribution_fn=sparsity.Uniform(0.5)),
        sparsity.GlobalMagnitudePruning(sparsity=0.5, use_normalization=False),
    ],
    ids=lambda pruner: type(pruner).__name__,
)
def test_a_parameter_that_is_too_large_for_a_search_is_refused(pruner):
    params = {"small": jnp.ones((2, 2)), "huge": jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"[Ff]ewer than 2\*\*31 "):
        jax.eval_shape(pruner.instant_sparsify, params)
