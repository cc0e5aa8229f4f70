"""A sparsity type of the user's own, in ten lines, under all that trains or prunes."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity


@dataclasses.dataclass(frozen=True)
class Rows(sparsity.SparsityType):
    """All entries of a row are kept or removed together; the largest decides."""

    def pool(self, scores, batch_axes=0):
        return jnp.max(scores, axis=-1)

    def expand(self, units, shape, batch_axes=0):
        return jnp.broadcast_to(units[..., None], shape)


_SHAPE = (2, 10, 8)  # a stack of two
_HALF = sparsity.Uniform(0.5)


def _params():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=_SHAPE), jnp.float32), "b": jnp.ones((2, 8))}


def _list_rows(mask):
    """Which rows are kept: bool[2, 10]; every row is all ones or all zeros."""
    mask = np.asarray(mask)
    assert mask.shape == _SHAPE
    assert np.all(mask == mask[..., :1])
    return mask[..., 0] == 1


def _best_rows(share):
    """Rows of each slice with the largest maximum of |w|, by numpy."""
    scores = np.abs(np.asarray(_params()["w"])).max(axis=-1)
    order = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
    return order < share


@pytest.mark.slow
def test_magnitude_keeps_the_rows_of_the_largest_weight_of_each_slice():
    pruner = sparsity.MagnitudePruning(
        sparsity_type=Rows(), batch_axes=1, sparsity_distribution_fn=_HALF
    )
    pruned, masks = pruner.instant_sparsify(_params())
    np.testing.assert_array_equal(_list_rows(masks["w"]), _best_rows(5))
    assert np.count_nonzero(pruned["w"]) == 80
    assert masks["b"] is None
    # Without batch axes the rows of both slices compete.
    mask = dataclasses.replace(pruner, batch_axes=0).instant_sparsify(_params())[1]["w"]
    assert _list_rows(mask).sum() == 10


_ALGORITHMS = {
    "magnitude": sparsity.MagnitudePruning,
    "random": sparsity.RandomPruning,
    "static": sparsity.StaticRandomSparse,
    "set": sparsity.SET,
    "rigl": sparsity.RigL,
}
_RAMP = sparsity.PolynomialSchedule(2, 0, 4, power=1)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("name", _ALGORITHMS)
def test_rows_train_with_a_ramp_packed_or_not_in_a_compiled_step(name, packed):
    updater = _ALGORITHMS[name](
        sparsity_type=Rows(),
        batch_axes=1,
        sparsity_distribution_fn=_HALF,
        scheduler=_RAMP,
        use_packed_masks=packed,
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params = _params()
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda w: jnp.cos(5 * w) + 0.1, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    kept = []
    for _ in range(6):
        params, state = step(params, state)
        rows = _list_rows(sparsity.active_masks(params, state)["w"])
        assert not np.any(np.asarray(params["w"])[~rows])
        kept.append(rows.sum(axis=-1).tolist())
    # Of ten rows: 0 % removed from step 0 on, 25 % from step 2 (7.5 is even 8), 50 % from step 4.
    ramp = [[10, 10], [10, 10], [8, 8], [8, 8], [5, 5], [5, 5]]
    assert kept == (ramp if name in ("magnitude", "random") else [[5, 5]] * 6)
    assert state.masks["w"].nbytes == (2 * 10 if packed else 160)


@pytest.mark.slow
def test_rows_move_as_wholes_to_the_largest_gradient():
    trainer = sparsity.RigL(
        sparsity_type=Rows(),
        batch_axes=1,
        sparsity_distribution_fn=_HALF,
        scheduler=sparsity.PeriodicSchedule(2),
        drop_fraction_fn=lambda step: 0.2,
    )
    tx = trainer.wrap_optax(optax.sgd(0.1))
    params = _params()
    state = tx.init(params)
    before = _list_rows(state.masks["w"])
    free = [np.flatnonzero(~rows)[0] for rows in before]
    grads = np.zeros(_SHAPE, np.float32)
    grads[0, free[0], 3] = grads[1, free[1], 7] = 1.0
    _, state = tx.update({"w": jnp.asarray(grads), "b": params["b"]}, state, params)
    after = _list_rows(state.masks["w"])
    magnitudes = np.abs(np.asarray(params["w"])).max(axis=-1)
    for at in (0, 1):
        lost = np.flatnonzero(before[at])[np.argmin(magnitudes[at][before[at]])]
        expected = before[at].copy()
        expected[lost], expected[free[at]] = False, True
        np.testing.assert_array_equal(after[at], expected)


def test_a_selection_of_ones_own_gets_the_rows_of_a_slice():
    shapes = []

    def first_three(scores, share):
        shapes.append(scores.shape)
        return jnp.arange(scores.size) < 3

    pruner = sparsity.MagnitudePruning(
        sparsity_type=Rows(), batch_axes=1, sparsity_distribution_fn=_HALF, topk_fn=first_three
    )
    rows = _list_rows(pruner.instant_sparsify(_params())[1]["w"])
    np.testing.assert_array_equal(rows, [[True] * 3 + [False] * 7] * 2)
    assert set(shapes) == {(10,)}


@dataclasses.dataclass(frozen=True)
class Pairs(sparsity.SparsityType):
    """Pairs of neighbours along the last axis compete within each row."""

    group_axes = 1

    def pool(self, scores, batch_axes=0):
        return jnp.max(scores.reshape(*scores.shape[:-1], -1, 2), axis=-1)

    def expand(self, units, shape, batch_axes=0):
        return jnp.repeat(units, 2, axis=-1)


def test_units_of_a_pattern_with_groups_compete_within_each():
    scores = jnp.array([[1.0, 9.0, 2.0, 2.0, 8.0, 0.0, 3.0, 3.0], [0.0] * 8])
    pruner = sparsity.MagnitudePruning(
        sparsity_type=Pairs(), sparsity_distribution_fn=sparsity.Uniform(0.5)
    )
    mask = pruner.instant_sparsify(scores)[1]
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    # Each row drops one of two active pairs, keeps the first, and grows its highest other one.
    grow = jnp.array([[0.0] * 6 + [3.0, 3.0], [0.0] * 2 + [1.0, 4.0, 5.0, 5.0, 0.0, 0.0]])
    moved = Pairs().move(mask, scores, grow, 0.5)
    np.testing.assert_array_equal(moved, [[1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1, 0, 0]])


class NoSubclass:
    """Has all methods of a pattern, and is none."""

    is_elementwise = False
    check, select, move, final_sparsity = (
        getattr(sparsity.SparsityType, name)
        for name in ("check", "select", "move", "final_sparsity")
    )


def type_name(value):
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize("wrong", [Rows, NoSubclass(), NoSubclass, "rows", None, 3], ids=type_name)
def test_a_class_and_an_object_of_no_subclass_are_refused(wrong):
    with pytest.raises(ValueError, match="sparsity_type must be"):
        sparsity.MagnitudePruning(sparsity_type=wrong)


@pytest.mark.parametrize("wrong", [Rows, NoSubclass(), "2:4"], ids=type_name)
def test_a_function_that_returns_no_type_is_an_error_with_the_leaf(wrong):
    pruner = sparsity.MagnitudePruning(
        sparsity_type=lambda path, param: wrong, batch_axes=1, sparsity_distribution_fn=_HALF
    )
    with pytest.raises(ValueError, match="sparsity_type of 'w' must be"):
        pruner.instant_sparsify(_params())


@dataclasses.dataclass(frozen=True)
class Complete(sparsity.SparsityType):
    """Keeps a third, whatever is asked for, of arrays with a multiple of three entries."""

    def check(self, shape, batch_axes=0, name="params"):
        if np.prod(shape) % 3:
            raise ValueError(f"{name} has {np.prod(shape)} entries")

    def final_sparsity(self, target):
        return 2 / 3


def test_the_check_of_a_type_is_called_with_shape_and_name():
    pruner = sparsity.MagnitudePruning(sparsity_type=Complete(), sparsity_distribution_fn=_HALF)
    with pytest.raises(ValueError, match="layer/w has 8 entries"):
        pruner.wrap_optax(optax.sgd(0.1)).init({"layer": {"w": jnp.ones((2, 4))}})


def test_a_target_that_a_type_does_not_reach_is_logged(caplog):
    pruner = sparsity.StaticRandomSparse(sparsity_type=Complete(), sparsity_distribution_fn=_HALF)
    pruner.init_state({"w": jnp.ones((3, 4))})
    assert "ends at sparsity 0.666667, not at the target 0.5 of 'w'" in caplog.text
    caplog.clear()
    sparsity.StaticRandomSparse(sparsity_type=Rows(), sparsity_distribution_fn=_HALF).init_state(
        {"w": jnp.ones((3, 4))}
    )
    assert not caplog.text


@pytest.mark.parametrize(
    ("kind", "target", "final"),
    [
        (sparsity.NByM(1, 4), 0.5, 0.75),
        (sparsity.NByM(1, 4), 0.0, 0.0),
        (sparsity.Unstructured(), 0.3, 0.3),
        (sparsity.Block((2, 2)), 0.3, 0.3),
        (sparsity.Channel(), 0.3, 0.3),
        (Rows(), 0.3, 0.3),
    ],
)
def test_the_sparsity_at_the_end_of_a_ramp(kind, target, final):
    assert kind.final_sparsity(target) == final


@pytest.mark.slow
def test_ragged_blocks_keep_their_number_of_blocks_and_not_of_entries():
    # (5, 5) in blocks of (2, 2): 3 x 3 blocks, of which round(4.5) = 4 stay; the corner has one
    # entry, the others of the last row and column two.
    scores = np.ones((5, 5), np.float32)
    scores[4, :], scores[:, 4] = 9, 9
    for average in (True, False):
        mask = sparsity.Block((2, 2), average).select(jnp.asarray(scores), 0.5)
        expected = np.zeros((5, 5), np.uint8)
        # The five edge blocks have score 9; the lowest indices are those of the right column.
        expected[:4, 4] = 1  # two blocks
        expected[4, :4] = 1  # two more, before the corner
        np.testing.assert_array_equal(mask, expected)
        assert int(mask.sum()) == 8  # of 25 entries, not half


def test_own_types_compete_in_no_global_scope():
    with pytest.raises(ValueError, match=r"ranks single weights.*Rows\(\)"):
        sparsity.GlobalMagnitudePruning(sparsity=0.5, sparsity_type=Rows())


def test_a_pattern_that_selects_by_itself_ranks_no_units_unless_it_says_so():
    class Selects(sparsity.SparsityType):
        def select(self, scores, sparsity, **options):
            return super().select(scores, sparsity, **options)

    class Moves(sparsity.SparsityType):
        def move(self, *args, **options):
            return super().move(*args, **options)

    class Says(Selects):
        ranks_units = True

        def select(self, scores, sparsity, **options):
            return super().select(scores, sparsity, **options)

    class Pools(sparsity.SparsityType):
        def pool(self, scores, batch_axes=0):
            return scores

    patterns = [Selects(), Moves(), Says(), Pools(), sparsity.NByM(2, 4), sparsity.Block((2, 2))]
    assert [pattern.ranks_units for pattern in patterns] == [False, False, True, True, False, True]


def test_a_mixin_overrides_what_a_pattern_selects():
    class KeepsAll:
        def select(self, scores, sparsity, **options):
            return jnp.ones(scores.shape, jnp.uint8)

    class Mixed(KeepsAll, sparsity.Unstructured):
        pass

    weights = jnp.arange(8.0).reshape(2, 4)
    pruner = sparsity.MagnitudePruning(sparsity_type=Mixed(), sparsity_distribution_fn=_HALF)
    assert pruner.instant_sparsify(weights)[1].tolist() == [[1] * 4] * 2


@dataclasses.dataclass(frozen=True)
class NamedRows(Rows):
    """Rows, with a field of the name `axis` that is no number."""

    axis: str = "rows"


@dataclasses.dataclass(frozen=True)
class Lines(sparsity.SparsityType):
    """Keeps or removes all entries with the same index along an axis of an unstacked parameter."""

    along: int

    def pool(self, scores, batch_axes=0):
        return jnp.moveaxis(scores, self.along, 0).reshape(scores.shape[self.along], -1).max(axis=1)

    def expand(self, units, shape, batch_axes=0):
        return jnp.broadcast_to(jnp.expand_dims(units, [*range(1, len(shape))]), shape)

    def renumber_axes(self, fn):
        return dataclasses.replace(self, along=fn(self.along))


@pytest.mark.parametrize("pattern", [NamedRows(), Lines(1)])
def test_layers_of_a_scan_are_pruned_along_the_axes_that_a_pattern_renumbers(pattern):
    params = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8)), jnp.float32)
    pruner = sparsity.MagnitudePruning(sparsity_type=pattern, sparsity_distribution_fn=_HALF)
    mask = sparsity.oneshot(pruner, _run_layers, params, [jnp.eye(8)])[1]
    largest = np.abs(params).max(axis=-1)
    kept = np.argsort(np.argsort(-largest, axis=-1), axis=-1) < 4
    np.testing.assert_array_equal(mask, np.broadcast_to(kept[..., None], params.shape))


def test_a_pattern_along_the_layers_of_a_scan_is_refused_by_name():
    pruner = sparsity.MagnitudePruning(sparsity_type=Lines(0), sparsity_distribution_fn=_HALF)
    with pytest.raises(ValueError, match=r"Lines\(along=0\) of 'params' lies along axis 0, whose"):
        sparsity.oneshot(pruner, _run_layers, jnp.ones((2, 8, 8)), [jnp.eye(8)])


def test_a_pattern_that_numbers_an_axis_and_cannot_renumber_it_is_refused_by_name():
    rows = dataclasses.make_dataclass("AxisRows", [("axis", int, 1)], bases=(Rows,), frozen=True)
    pruner = sparsity.MagnitudePruning(sparsity_type=rows(), sparsity_distribution_fn=_HALF)
    with pytest.raises(ValueError, match=r"AxisRows\(axis=1\) numbers an axis.*renumber_axes"):
        sparsity.oneshot(pruner, _run_layers, jnp.ones((2, 8, 8)), [jnp.eye(8)])


def _run_layers(params, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]


@pytest.mark.parametrize(
    ("hook", "returned", "got"),
    [
        ("pool", None, r"pool of 'w' must be an array of real numbers, got .* = None"),
        ("pool", jnp.ones(2, complex), "pool of 'w' must be an array of real .*complex64"),
        ("expand", None, "expand of 'w' must be an array of real numbers, got .* = None"),
        ("expand", jnp.ones(3), r"expand of 'w' must have shape \(2, 4\), got .* = \(3,\)"),
        ("select", None, "mask of 'w' by Layerwise.select must be an array of real .* = None"),
        ("final_sparsity", 1.01, r"final_sparsity of 'w' must be in \[0, 1\] .* = 1.01"),
        ("final_sparsity", np.nan, r"final_sparsity of 'w' must be in \[0, 1\] .* = nan"),
        ("final_sparsity", "0.5", r"final_sparsity of 'w' must be in \[0, 1\] .* = '0.5'"),
        ("final_sparsity", np.ones(2), r"final_sparsity of 'w' must be in \[0, 1\] .* = array"),
    ],
)
def test_results_of_hooks_are_checked_by_the_name_of_hook_and_parameter(hook, returned, got):
    kind = type("Odd", (Rows,), {hook: lambda self, *args, **kwargs: returned})
    pruner = sparsity.MagnitudePruning(sparsity_type=kind(), sparsity_distribution_fn=_HALF)
    with pytest.raises(ValueError, match=got):
        pruner.instant_sparsify({"w": jnp.ones((2, 4))})


@pytest.mark.parametrize(("final", "ends"), [(None, None), (1 + 1e-9, 1.0), (-1e-9, 0.0)])
def test_a_final_sparsity_may_be_unknown_or_rounded(caplog, final, ends):
    kind = type("Odd", (Rows,), {"final_sparsity": lambda self, target: final})
    pruner = sparsity.MagnitudePruning(sparsity_type=kind(), sparsity_distribution_fn=_HALF)
    pruner.compute_targets({"w": jnp.ones((2, 4))}, pruner.sites({"w": jnp.ones((2, 4))}))
    assert ("ends at sparsity" in caplog.text) == (ends is not None)


def test_a_count_of_ones_own_is_a_number_of_entries():
    @dataclasses.dataclass(frozen=True)
    class Miscounted(sparsity.Unstructured):
        count: float = 9

        def count_kept(self, shape, sparsity, batch_axes=0):
            return self.count

    options = {"sparsity_distribution_fn": _HALF, "use_compact_state": True}
    for count in (4.0, jnp.int32(4), np.array(4), Fraction(4)):
        exact = sparsity.StaticRandomSparse(sparsity_type=Miscounted(count), **options)
        state = jax.eval_shape(exact.wrap_optax(optax.sgd(0.1, 0.9)).init, {"w": jnp.ones((2, 4))})
        assert state.inner_state
    pruner = sparsity.StaticRandomSparse(sparsity_type=Miscounted(), **options)
    message = r"Miscounted\(.*\)\.count_kept of 'w' must be at most 8, got .* = 9"
    with pytest.raises(ValueError, match=message):
        pruner.wrap_optax(optax.sgd(0.1)).init({"w": jnp.ones((2, 4))})
    entries = sparsity.Uniform(entries=4)
    pruner = sparsity.MagnitudePruning(sparsity_type=Miscounted(), sparsity_distribution_fn=entries)
    with pytest.raises(ValueError, match=message):
        pruner.init_state({"w": jnp.ones((2, 4))})
