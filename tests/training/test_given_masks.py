"""Masks that a user hands to `wrap_optax`: kept, started from, or refused with the leaf's name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity

_HALF = sparsity.Uniform(0.5)
_TYPES = {1: sparsity.Channel(0), 2: sparsity.Unstructured()}


def _params():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), "b": jnp.ones(8)}


def _mask():
    """A quarter of the weights; no algorithm would choose them."""
    return (np.arange(32).reshape(4, 8) % 4 == 1).astype(np.uint8)


def _masks(**other):
    return {"w": jnp.asarray(_mask()), "b": None} | other


def _start(updater, masks):
    return updater.wrap_optax(optax.sgd(0.1), masks=masks).init(_params())


def _in_use(state):
    return np.asarray(sparsity.active_masks(_params(), state)["w"])


_DENSITIES = (("a", 0.7), ("b", 0.35))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("distribution", [None, _HALF, sparsity.sparsity_distributions.uniform])
def test_static_training_keeps_the_masks_with_a_distribution_or_without(packed, distribution):
    trainer = sparsity.StaticRandomSparse(
        sparsity_distribution_fn=distribution, use_packed_masks=packed
    )
    tx = trainer.wrap_optax(optax.sgd(0.1), masks=_masks())
    params = _params()
    state = tx.init(params)
    # The distribution says the target if there is one; else it is what the mask has.
    assert float(state.target_sparsities["w"]) == (0.5 if distribution == _HALF else 0.75)
    assert state.target_sparsities["b"] is None
    for _ in range(3):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(_in_use(state), _mask())
        np.testing.assert_array_equal(np.asarray(params["w"]) != 0, _mask())


@pytest.mark.parametrize(
    "form",
    [
        lambda mask: mask,
        lambda mask: mask.astype(bool),
        lambda mask: mask.astype(np.float32) * 0.5,
        lambda mask: jnp.asarray(mask, jnp.int32) * -3,
    ],
    ids=["uint8", "bool", "float", "int"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_masks_of_any_dtype_keep_what_is_not_zero(form, packed):
    trainer = sparsity.StaticRandomSparse(use_packed_masks=packed)
    state = _start(trainer, _masks(w=form(_mask())))
    assert state.masks["w"].dtype == jnp.uint8
    np.testing.assert_array_equal(_in_use(state), _mask())


@pytest.mark.parametrize(
    "pack",
    [
        lambda masks: sparsity.masks.pack_masks(masks, _params()),
        lambda masks: {"w": jnp.packbits(masks["w"]), "b": None},
    ],
    ids=["pack_masks", "packbits"],
)
def test_packed_masks_are_taken_where_masks_are_packed(pack):
    state = _start(sparsity.StaticRandomSparse(use_packed_masks=True), pack(_masks()))
    assert state.masks["w"].shape == (4, 1)
    np.testing.assert_array_equal(_in_use(state), _mask())
    with pytest.raises(ValueError, match="mask of 'w' among the masks of wrap_optax has shape"):
        _start(sparsity.StaticRandomSparse(), pack(_masks()))


def test_masks_of_a_pruner_go_into_training_as_they_come():
    for packed in (False, True):
        pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=_HALF, use_packed_masks=packed)
        pruned, masks = pruner.instant_sparsify(_params())
        state = _start(sparsity.StaticRandomSparse(use_packed_masks=packed), masks)
        np.testing.assert_array_equal(_in_use(state), np.asarray(pruned["w"]) != 0)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_masks_that_move_start_from_the_given_ones(cls):
    trainer = cls(
        sparsity_distribution_fn=_HALF,
        scheduler=sparsity.PeriodicSchedule(2),
        drop_fraction_fn=lambda step: 0.25,
    )
    tx = trainer.wrap_optax(optax.sgd(0.1), masks=_masks())
    params = _params()
    state = tx.init(params)
    np.testing.assert_array_equal(_in_use(state), _mask())
    _, state = tx.update(params, state, params)
    moved = _in_use(state)
    assert moved.sum() == 8  # as many as before, whatever the target
    assert (moved & _mask()).sum() >= 6  # a quarter of the eight was dropped


@pytest.mark.parametrize("kind", [sparsity.Block((2, 2)), sparsity.FanIn(4), sparsity.Channel(-1)])
def test_masks_with_parts_of_units_are_refused_where_they_would_move(kind):
    options = {"sparsity_distribution_fn": _HALF, "sparsity_type": kind}
    moving = sparsity.SET(scheduler=sparsity.PeriodicSchedule(2), **options)
    entries = np.zeros((4, 8), np.uint8)
    entries[::2, ::2] = entries[1::2, 1::2] = 1  # half of the entries, and a part of every unit
    with pytest.raises(ValueError, match=r"'w' among .* keeps parts of"):
        _start(moving, _masks(w=entries))
    packed = dataclasses.replace(moving, use_packed_masks=True)
    for updater, mask in ((moving, entries), (packed, np.packbits(entries, -1))):
        tx = updater.wrap_optax(optax.sgd(0.1), masks=_masks(w=mask))
        with pytest.raises(ValueError, match=r"'w' among .* keeps parts of"):
            jax.eval_shape(tx.init, _params())
    units = np.zeros((4, 8), np.uint8)
    units[:2, :4] = units[2:, 4:] = 1
    if isinstance(kind, sparsity.Channel):
        units = np.arange(8) % 2 * np.ones((4, 1), np.uint8)
    np.testing.assert_array_equal(_in_use(_start(moving, _masks(w=units))), units)
    fixed = sparsity.StaticRandomSparse(**options)
    np.testing.assert_array_equal(_in_use(_start(fixed, _masks(w=entries))), entries)


def _hidden(params, x):
    return jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]


def _start_channels(cls, masks, **options):
    params = _params() | {"v": jnp.ones((8, 3))}
    graph = sparsity.trace(_hidden, params, jnp.ones((2, 4)))
    options = {"scheduler": sparsity.PeriodicSchedule(2)} | options
    updater = cls(scope=sparsity.Coupled(graph), sparsity_distribution_fn=_HALF, **options)
    tx = updater.wrap_optax(optax.sgd(0.1), masks=masks)
    return tx, params, tx.init(params)


def _channels(**other):
    stays = np.arange(8) % 2
    mask = {"w": stays * np.ones((4, 1)), "b": stays, "v": stays[:, None] * np.ones((1, 3))}
    return jax.tree.map(lambda x: x.astype(np.uint8), mask) | other


@pytest.mark.parametrize(
    "cls",
    [
        sparsity.RigL,
        sparsity.SET,
        sparsity.MagnitudePruning,
        functools.partial(sparsity.SteMagnitudePruning, store_masks=True),
    ],
)
@pytest.mark.parametrize(
    "other",
    [
        {"w": _mask()},  # each channel in part
        {"v": (np.arange(24).reshape(8, 3) % 2).astype(np.uint8)},
        {"b": None},  # goes with the others
        {"b": np.ones(8, np.uint8)},
    ],
)
def test_masks_with_parts_of_coupled_channels_are_refused_where_they_would_change(cls, other):
    with pytest.raises(ValueError, match=r"'[bvw]' among the masks of wrap_optax keeps parts of"):
        _start_channels(cls, _channels(**other))


def test_masks_of_coupled_channels_move_and_stay_as_many():
    tx, params, state = _start_channels(sparsity.RigL, _channels())
    _, moved = jax.jit(tx.update)(params, state, params)
    for masks in (state.masks, moved.masks):
        assert [int(masks[name].sum()) for name in "wbv"] == [16, 4, 12]
    packed = jax.tree.map(lambda x: np.packbits(x, -1), _channels(w=_mask()))
    with pytest.raises(ValueError, match="'w' among the masks of wrap_optax keeps parts of"):
        _start_channels(sparsity.SET, packed, use_packed_masks=True)


def test_parts_of_coupled_channels_stay_where_no_update_changes_masks():
    partial = _channels(w=_mask())
    for cls in (sparsity.StaticRandomSparse, sparsity.MagnitudePruning):
        options = {"scheduler": sparsity.NoUpdateSchedule()}
        _, _, state = _start_channels(cls, partial, **options)
        jax.tree.map(np.testing.assert_array_equal, state.masks, partial)


def test_complex_masks_keep_entries_that_are_not_zero():
    state = _start(sparsity.StaticRandomSparse(), _masks(w=_mask() * np.complex64(1j)))
    np.testing.assert_array_equal(_in_use(state), _mask())


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("name", ["magnitude", "lamp"])
def test_a_ramp_starts_from_the_masks_which_only_shrink(name, packed):
    schedule = sparsity.PolynomialSchedule(
        update_freq=1, update_start_step=0, update_end_step=8, power=1
    )
    pruner = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=sparsity.Uniform(0.8, filter_fn=lambda *_: True),
        scheduler=schedule,
        use_packed_masks=packed,
    )
    mask = np.random.default_rng(0).permutation(np.repeat([1, 0], [16, 16])).reshape(4, 8)
    params = {"w": jnp.linspace(1.0, 2.0, 32).reshape(4, 8)}
    tx = pruner.wrap_optax(optax.sgd(0.01), masks={"w": mask})
    params, state = pruner.init(tx, params)
    before, counts = mask, []
    for _ in range(9):
        updates, state = jax.jit(tx.update)(params, state, params)
        params = optax.apply_updates(params, updates)
        kept = np.asarray(params["w"]) != 0
        assert np.all(before[kept])
        before = kept
        counts.append(kept.sum())
    assert counts == [16, 16, 16, 16, 16, 16, 13, 10, 6]


@pytest.mark.parametrize("scope", [sparsity.Layerwise(), sparsity.Global()], ids=repr)
@pytest.mark.parametrize("name", ["saliency", "movement"])
def test_a_ramp_is_never_denser_than_the_masks_that_weights_may_return_to(name, scope):
    rng = np.random.default_rng(0)
    masks = {key: (rng.random((8, 12)) < density).astype(np.uint8) for key, density in _DENSITIES}
    params = {key: jnp.asarray(rng.normal(size=(8, 12)), jnp.float32) for key, _ in _DENSITIES}
    pruner = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=sparsity.Uniform(0.75),
        scheduler=sparsity.PolynomialSchedule(2, 0, 6),
        scope=scope,
    )
    tx = pruner.wrap_optax(optax.adam(0.05), masks=masks)
    params, state = pruner.init(tx, params)
    update, history = jax.jit(tx.update), [masks]
    for _ in range(8):
        grads = {key: jnp.asarray(rng.normal(size=(8, 12)), jnp.float32) for key in params}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.device_get(state.masks))
    kept = [[int(tree[key].sum()) for key, _ in _DENSITIES] for tree in history]
    if scope == sparsity.Layerwise():
        assert all(
            now <= before
            for pair in zip(kept[1:], kept, strict=False)
            for now, before in zip(*pair, strict=True)
        )
    else:
        assert all(sum(now) <= sum(before) for now, before in zip(kept[1:], kept, strict=False))
    assert sum(kept[-1]) <= 48 < sum(kept[1])


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_a_mask_is_made_into_a_target_also_where_the_distribution_has_none(packed):
    trainer = sparsity.StaticRandomSparse(sparsity_distribution_fn=_HALF, use_packed_masks=packed)
    state = _start(trainer, {"w": None, "b": jnp.arange(8) < 6})
    assert state.target_sparsities["w"] is None
    assert float(state.target_sparsities["b"]) == 0.25
    assert state.masks["w"] is None


def test_masks_are_read_once_and_not_changed():
    masks = {"w": _mask(), "b": None}
    tx = sparsity.StaticRandomSparse().wrap_optax(optax.sgd(0.1), masks=masks)
    jax.block_until_ready(jax.jit(tx.init)(_params()))
    np.testing.assert_array_equal(masks["w"], _mask())
    np.testing.assert_array_equal(_in_use(jax.jit(tx.init)(_params())), _mask())


# What does not fit.


@pytest.mark.parametrize(
    ("masks", "named"),
    [
        ({"w": _mask()}, r"masks of wrap_optax have nothing for 'b'"),
        ({"b": None}, r"have nothing for 'w'"),
        ({}, r"have nothing for 'b', 'w'"),
        (_masks(other=_mask()), r"no leaf at 'other'.*'b', 'w'"),
        (_masks(other=None), r"no leaf at 'other', which the masks of wrap_optax have"),
        ({"layer": {"w": _mask()}}, r"no leaf at 'layer/w'"),
        (_masks(w=_mask()[:, :1]), r"'w' among the masks of wrap_optax has shape \(4, 1\), but"),
        (_masks(w=_mask().T), r"'w' .* has shape \(8, 4\), but its parameter has shape \(4, 8\)"),
        (_masks(w=np.uint8(1)), r"'w' .* has shape \(\), but"),
    ],
)
def test_masks_that_do_not_fit_are_an_error_that_names_the_leaf(masks, named):
    with pytest.raises(ValueError, match=named):
        _start(sparsity.StaticRandomSparse(), masks)


def test_a_column_for_a_square_is_no_packed_mask():
    params = {"w": jnp.ones((8, 8))}
    masks = {"w": np.ones((8, 1), np.uint8)}
    with pytest.raises(ValueError, match=r"'w' .* \(8, 1\), but its parameter has shape \(8, 8\)"):
        sparsity.StaticRandomSparse().wrap_optax(optax.sgd(0.1), masks=masks).init(params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sparsity_type": sparsity.Channel(1)}, r"'b' of shape \(8,\) has no axis 1"),
        ({"sparsity_type": sparsity.NByM(1, 3)}, "which m = 3 does not divide"),
        (
            {"scope": sparsity.Global(), "sparsity_type": lambda path, x: _TYPES[x.ndim]},
            "A global scope ranks single weights",
        ),
        ({}, "'b' is no array of floating-point numbers"),
    ],
)
def test_a_mask_that_no_update_could_replace_is_an_error_at_init(options, why):
    params = _params() | {"w": jnp.ones((4, 9))} | ({} if options else {"b": jnp.arange(8)})
    masks = {"w": np.ones((4, 9), np.uint8), "b": np.arange(8) < 6}
    scheduler = sparsity.OneShotSchedule(1)
    updater = sparsity.SET(sparsity_distribution_fn=_HALF, scheduler=scheduler, **options)
    tx = updater.wrap_optax(optax.sgd(0.1), masks=masks)
    with pytest.raises(ValueError, match=f"one for 'b'.* Give None for it there.*{why}"):
        tx.init(params)
    updater.wrap_optax(optax.sgd(0.1), masks=masks | {"b": None}).init(params)


def test_algorithms_without_masks_take_none():
    with pytest.raises(ValueError, match="NoPruning keeps all parameters dense"):
        sparsity.NoPruning().wrap_optax(optax.sgd(0.1), masks=_masks())
