"""Every registered algorithm through every transform, dtype, option and type that it supports.

All cases train the same small network and check the same invariants, see `_check`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

pytestmark = pytest.mark.slow


_STEPS = 5  # masks are updated at steps 1, 3 and, as the last, 4
_KEPT = {"hidden": 32, "out": 16}  # of 8 x 16 and 16 x 4, for every type below
_NAMES = sparsity.all_algorithm_names()
_GLOBAL = helpers.list_names(helpers.prunes, helpers.ranks_all_layers)
_TYPED = helpers.list_names(helpers.prunes, helpers.takes_types)
# Half the compilation, where two pruned layers show no more than one.
_ONE_LAYER = {"custom_sparsity_map": {"out/kernel": None}}
_TYPES = {
    "nm": sparsity.NByM(1, 4),
    "block": sparsity.Block((2, 2)),
    "channel": sparsity.Channel(-1),
    "fan_in": sparsity.FanIn(4),
}


def _make(name, **options):
    return helpers.make_updater(name, update_end_step=_STEPS - 1, **options)


def _network(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, dtype)  # noqa: E731
    return {
        "hidden": {"kernel": draw(8, 16), "bias": draw(16)},
        "out": {"kernel": draw(16, 4), "bias": draw(4)},
    }


def _batches(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return (
        jnp.asarray(rng.normal(size=(_STEPS, 6, 8)), dtype),
        jnp.asarray(rng.normal(size=(_STEPS, 6, 4)), dtype),
    )


def _optimizer(updater):
    # With a smaller eps regrown weights would all move equally far, and tie in the next update.
    return updater.wrap_optax(optax.adam(0.05, eps=0.05))


def _step_fn(updater, grad_dtype=None):
    tx = _optimizer(updater)

    def step(params, state, x, y):
        def loss(params):
            params = updater.pre_forward_update(params, state)
            hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
            return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2)

        grads = jax.grad(loss)(params)
        if grad_dtype is not None:
            grads = jax.tree.map(lambda grad: grad.astype(grad_dtype), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _train_in(updater, params, *, grad_dtype=None, transform=jax.jit):
    """Trains step by step; returns what it came to, and the state at the start."""
    state = start = _optimizer(updater).init(params)
    if transform is _donated:
        start = jax.tree.map(jnp.copy, start)
    step = transform(_step_fn(updater, grad_dtype))
    for x, y in zip(*_batches(params["out"]["bias"].dtype), strict=True):
        params, state = step(params, state, x, y)
    if transform is not _eager:
        assert step._cache_size() == 1  # one compilation
    return params, state, start


def _eager(step):
    return step


def _donated(step):
    return jax.jit(step, donate_argnums=(0, 1))


@functools.cache
def _reference(name):
    return _train_in(_make(name), _network(), transform=_donated)


def _masks(updater, params, state):
    """Masks of the pruned kernels, unpacked, or of what the model sees of dense weights."""
    targets = state.target_sparsities
    layers = [layer for layer in _KEPT if targets and targets[layer]["kernel"] is not None]
    if not jax.tree.leaves(state.masks):
        seen = updater.pre_forward_update(params, state)
        return {layer: np.asarray(seen[layer]["kernel"] != 0) for layer in layers}
    masks = {layer: np.asarray(state.masks[layer]["kernel"]) for layer in layers}
    if updater.use_packed_masks:
        for layer, mask in masks.items():
            rows, columns = params[layer]["kernel"].shape
            assert mask.shape == (rows, -(-columns // 8))
            masks[layer] = np.unpackbits(mask, axis=-1, count=columns)
    return masks


def _check(name, updater, params, state, start, dtype=jnp.float32):
    """The invariants of every run."""
    assert jax.tree.structure(state) == jax.tree.structure(start)
    for (path, leaf), first in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(start), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (first.shape, first.dtype), path
    assert int(state.count) == _STEPS
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == dtype
        assert np.all(np.isfinite(leaf.astype(jnp.float32)))
    masks = _masks(updater, params, state)
    kept = {layer: int(mask.sum()) for layer, mask in masks.items()}
    assert bool(kept) == helpers.prunes(name)
    if name in _GLOBAL:
        assert sum(kept.values()) == sum(_KEPT[layer] for layer in kept)
    elif helpers.has_constant_fan_in(name):
        for layer, mask in masks.items():
            fans = {int(fan) for fan in mask.sum(axis=0)} - {0}
            remaining = np.count_nonzero(mask.any(axis=0))
            assert fans == {min(mask.shape[0], _KEPT[layer] // remaining)}
    else:
        assert kept == {layer: _KEPT[layer] for layer in kept}
    if helpers.prunes(name) and not helpers.is_straight_through(name):
        for layer, mask in masks.items():
            kernel = np.asarray(params[layer]["kernel"])
            bits = kernel.view(f"uint{8 * kernel.itemsize}")
            assert not np.any(bits[mask == 0])  # +0.0
            np.testing.assert_array_equal(
                updater.post_gradient_update(params, state)[layer]["kernel"], kernel
            )
    if helpers.prunes(name):
        for layer in _KEPT:
            assert np.all(np.asarray(params[layer]["bias"]) != 0)
        assert state.masks["hidden"]["bias"] is None
    assert all(mask.dtype == jnp.uint8 for mask in jax.tree.leaves(state.masks))


def _assert_same(actual, expected, exact):
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        if exact or not jnp.issubdtype(want.dtype, jnp.inexact):
            np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_allclose(
                got, want, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path)
            )


def _run_jit(name):
    _check(name, _make(name), *_reference(name))


def _run_eager(name):
    updater = _make(name)
    actual = _train_in(updater, _network(), transform=_eager)
    _check(name, updater, *actual)
    _assert_same(actual, _reference(name), exact=False)


def _train_by_scan(updater, params):
    step = _step_fn(updater)
    state = _optimizer(updater).init(params)
    (params, last), _ = jax.lax.scan(
        lambda carry, batch: (step(*carry, *batch), None),
        (params, state),
        _batches(params["out"]["bias"].dtype),
    )
    return params, last, state


def _run_scan(name):
    updater = _make(name)
    actual = jax.jit(functools.partial(_train_by_scan, updater))(_network())
    _check(name, updater, *actual)
    _assert_same(actual, _reference(name), exact=False)


def _run_vmap(name):
    """The whole training function in bfloat16, over three seeds of parameters and masks."""

    def train(key, params):
        return _train_by_scan(_make(name, rng_seed=key, **_ONE_LAYER), params)

    keys = jax.random.split(jax.random.key(0), 3)
    starts = [_network(seed, jnp.bfloat16) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    actual = jax.jit(jax.vmap(train))(keys, stacked)
    masks = []
    for index in range(3):
        updater = _make(name, rng_seed=keys[index], **_ONE_LAYER)
        params, state, start = jax.tree.map(lambda leaf, i=index: leaf[i], actual)
        _check(name, updater, params, state, start, dtype=jnp.bfloat16)
        masks += [mask.tobytes() for mask in _masks(updater, params, state).values()]
    assert len(set(masks)) == len(masks)


def _run_packed(name):
    updater = _make(name, use_packed_masks=True)
    params, state, start = _train_in(updater, _network())
    _check(name, updater, params, state, start)
    plain, plain_state, _ = _reference(name)
    _assert_same(params, plain, exact=True)
    _assert_same(state.inner_state, plain_state.inner_state, exact=True)
    if jax.tree.leaves(plain_state.masks):
        for layer, mask in _masks(updater, params, state).items():
            np.testing.assert_array_equal(mask, plain_state.masks[layer]["kernel"])


_CASES = {
    "jit and donation": _run_jit,
    "eager": _run_eager,
    "scan": _run_scan,
    "vmap of bfloat16": _run_vmap,
    "packed": _run_packed,
}
# Each algorithm has one of them by default or neither; gradients are less precise than weights.
_OPTIONS = {
    "dense bfloat16 gradients, not skipped": {
        "is_sparse_gradients": False,
        "skip_gradients": False,
    },
    "sparse bfloat16 gradients, skipped": {"is_sparse_gradients": True, "skip_gradients": True},
}


def _differs(name, options):
    return any(getattr(_make(name), field) != value for field, value in options.items())


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("name", _NAMES)
def test_algorithm(name, case):
    _CASES[case](name)


def _train_with(name, case, **options):
    updater = _make(name, **_OPTIONS[case], **options, **_ONE_LAYER)
    params, state, start = _train_in(updater, _network(), grad_dtype=jnp.bfloat16)
    _check(name, updater, params, state, start)
    return updater, params, state


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in _NAMES
        for case, options in _OPTIONS.items()
        if name not in _TYPED and _differs(name, options)  # types are tested with both options
    ],
)
def test_option(name, case):
    _train_with(name, case)


@pytest.mark.parametrize(("kind", "case"), [*zip(_TYPES, [*_OPTIONS] * 2, strict=True)])
@pytest.mark.parametrize("name", _TYPED)
def test_type(name, kind, case):
    updater, params, state = _train_with(name, case, sparsity_type=_TYPES[kind])
    for mask in _masks(updater, params, state).values():
        if kind == "nm":
            units = mask.reshape(-1, 4).sum(axis=1)
            assert np.all(units == 1)
        elif kind == "block":
            blocks = mask.reshape(mask.shape[0] // 2, 2, -1, 2).sum(axis=(1, 3))
            assert set(blocks.ravel().tolist()) == {0, 4}
        elif kind == "fan_in":
            groups = mask.reshape(mask.shape[0], -1, 4)
            assert np.all(groups == groups[..., :1])
            assert {*mask.sum(axis=0).tolist()} == {mask.shape[0] // 4}
        else:
            assert set(mask.sum(axis=0).tolist()) == {0, mask.shape[0]}


@pytest.mark.parametrize("kind", _TYPES)
@pytest.mark.parametrize("name", _GLOBAL)
def test_global_algorithms_say_that_they_rank_single_weights(name, kind):
    with pytest.raises(ValueError, match=r"needs sparsity_type = Unstructured\(\)"):
        _make(name, sparsity_type=_TYPES[kind])
