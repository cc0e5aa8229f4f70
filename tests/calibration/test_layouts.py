"""However a product reads a leaf, its statistics are those of the outputs' derivatives.

An output y is linear in the leaf W, so that dy/dW is what each entry meets. Over all outputs the
squares of dy/dW add up to the squares of the inputs, and those of (dy/dW . D) to the error of D.
Layouts are drawn at random: transposed, cut, merged, broadcast, reversed, mapped and scanned.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import output_error


def some_shape(rng, most=4):
    return tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6], rng.integers(1, most + 1)))


def reshape_at(w, axis, count, *sizes):
    return w.reshape(*w.shape[:axis], *sizes, *w.shape[axis + count :])


def moved(rng, w):
    """A leaf after some random layout operations."""
    for _ in range(rng.integers(0, 5)):
        axis, kind = int(rng.integers(max(w.ndim, 1))), rng.integers(6)
        if kind == 0:
            w = w.transpose(rng.permutation(w.ndim))
        elif kind == 1 and w.ndim and w.shape[axis] in (4, 6):
            w = reshape_at(w, axis, 1, *((2, -1) if rng.integers(2) else (-1, 2)))
        elif kind == 2 and axis + 1 < w.ndim:
            w = reshape_at(w, axis, 2, -1)
        elif kind == 3 and w.size < 300:
            w = w[None]
        elif kind == 4 and w.size < 300:
            w = jnp.broadcast_to(jnp.expand_dims(w, axis), (*w.shape[:axis], 3, *w.shape[axis:]))
        elif kind == 5 and w.ndim:
            w = jnp.flip(w, axis)
    return w


def dot(rng):
    """A random leaf in a random `dot_general`: the model of a leaf, the leaf, and its input."""
    w, seed = rng.normal(size=some_shape(rng)), int(rng.integers(2**31))
    view = jax.eval_shape(lambda w: moved(np.random.default_rng(seed), w), w)
    axes = [int(axis) for axis in rng.permutation(view.ndim)]
    slices = int(rng.integers(max(view.ndim, 1)))
    inputs = int(rng.integers(slices, view.ndim)) + 1 if view.ndim else 0
    batch, contracted = axes[:slices], axes[slices:inputs]
    sizes = [view.shape[axis] for axis in (*batch, *contracted)]
    sizes += some_shape(rng, 2)
    order = rng.permutation(len(sizes))
    x, place = rng.normal(size=[sizes[i] for i in order]), [int(i) for i in np.argsort(order)]
    numbers = (contracted, place[slices:inputs]), (batch, place[:slices])
    is_first = bool(rng.integers(2))

    def model(w, x):
        w = moved(np.random.default_rng(seed), w)
        if is_first:
            return jax.lax.dot_general(w, x, numbers)
        return jax.lax.dot_general(x, w, tuple(pair[::-1] for pair in numbers))

    return model, w, x


def convolution(rng):
    """A random leaf in a random convolution."""
    groups, ndim = int(rng.choice([1, 1, 2, 3])), int(rng.integers(1, 3))
    channels = groups * int(rng.integers(1, 3)), groups * int(rng.integers(1, 4))
    window = [int(n) for n in rng.integers(1, 4, ndim)]
    kernel = [channels[1], channels[0] // groups, *window]
    order, kind = rng.permutation(len(kernel)), rng.integers(5)
    w, x = rng.normal(size=[kernel[i] for i in order]), [2, channels[0], *[6] * ndim]
    options = {
        "window_strides": [int(n) for n in rng.integers(1, 3, ndim)],
        "rhs_dilation": [int(n) for n in rng.integers(1, 3, ndim)],
        "padding": [(int(a), int(b)) for a, b in rng.integers(0, 3, (ndim, 2))],
        "lhs_dilation": [int(n) for n in rng.integers(1, 3, ndim)],
    }

    def convolve(w, x, copies=1):
        w = w.transpose(np.argsort(order))
        w = jnp.flip(w, range(2, w.ndim)) if kind == 0 else jnp.concatenate([w])
        w = jnp.broadcast_to(w, (copies, *w.shape)).reshape(-1, *w.shape[1:])
        return jax.lax.conv_general_dilated(x, w, feature_group_count=groups * copies, **options)

    if kind == 1:  # a kernel for all groups
        return lambda w, x: convolve(w, x, 2), w, rng.normal(size=[2, 2 * channels[0], *x[2:]])
    if kind == 2:
        return jax.vmap(convolve, (0, None)), rng.normal(size=[2, *w.shape]), rng.normal(size=x)
    if kind == 3:
        return jax.vmap(convolve), rng.normal(size=[2, *w.shape]), rng.normal(size=[2, *x])
    return convolve, w, rng.normal(size=x)


def repeated(rng):
    """A random `dot_general` in a loop, a branch, or mapped."""
    model, w, x = dot(rng)
    stack, data = rng.normal(size=[3, *w.shape]), rng.normal(size=[3, *x.shape])
    scan = jax.lax.scan
    return [
        (lambda w, x: jax.lax.map(lambda x: model(w, x), x), w, data),
        (lambda w, x: scan(lambda c, w: (c, model(w, x)), 0.0, w)[1], stack, x),
        (
            lambda w, x: scan(lambda c, w: (c, model(w, x)), 0.0, jnp.moveaxis(w, -1, 0))[1],
            np.moveaxis(stack, 0, -1),
            x,
        ),
        (jax.vmap(model, (None, 0)), w, data),
        (jax.vmap(model, (0, None)), stack, x),
        (
            lambda w, x: jax.lax.cond(x.sum() > 1e9, lambda: 0 * model(w, x), lambda: model(w, x)),
            w,
            x,
        ),
        (
            lambda w, x: scan(
                lambda c, w: (c, jax.lax.map(lambda x: model(w, x), x)), 0.0, w, reverse=True
            )[1],
            stack,
            data,
        ),
    ][rng.integers(7)]


KINDS = {"dot": dot, "convolution": convolution, "repeated": repeated}
SEEDS = 12


matrices = jax.jit(sparsity.Statistic.to_matrices)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_derivatives(kind, part):
    told = 0
    with jax.enable_x64(True):
        for seed in range(SEEDS * part, SEEDS * (part + 1)):
            rng = np.random.default_rng(seed)
            model, w, x = KINDS[kind](rng)
            w, x = jnp.asarray(w), jnp.asarray(x)
            if w.size * jax.eval_shape(model, w, x).size > 10**6:
                continue
            outputs = np.asarray(jax.jit(jax.jacrev(model))(w, x)).reshape(-1, *w.shape)
            statistics = sparsity.calibrate(model, w, [x], "gram")
            if () not in statistics:  # `oneshot` says so
                continue
            told += 1
            statistic, difference = statistics[()], rng.normal(size=w.shape)
            lost = np.sum(np.tensordot(outputs, difference, w.ndim) ** 2)
            error = np.sum(jax.jit(output_error)(statistic, difference))
            np.testing.assert_allclose(error, lost, rtol=1e-9, err_msg=f"{kind}, seed {seed}")
            sums_of_entries = [(statistic.sums_of_squares(), outputs**2)]
            if seed % 2:  # moments are sums over the same rows
                moments = sparsity.calibrate(model, w, [x], "moments")[()]
                sums_of_entries += [(moments.squares, outputs**2), (moments.sums, outputs)]
            for sums, entries in sums_of_entries:
                each = np.asarray(matrices(statistic, entries.sum(0)))
                met = np.broadcast_to(np.asarray(sums)[..., None, :], each.shape)
                np.testing.assert_allclose(met, each, rtol=1e-9, atol=1e-9)
            met = (outputs != 0).sum(0).max(initial=0)
            assert met <= int(statistic.count) if kind == "convolution" else met == statistic.count
    assert told > SEEDS / 2


JOINED = {
    "stacked with others": lambda p, x: jnp.einsum("bi,eio->beo", x, jnp.stack([p["w"], p["v"]])),
    "joined": lambda p, x: x @ jnp.concatenate([p["w"], p["v"]], axis=1),
    "padded": lambda p, x: jnp.pad(x, ((0, 0), (0, 2))) @ jnp.pad(p["w"], ((0, 2), (0, 0))),
    "inputs and experts in one axis": lambda p, x: jnp.einsum(
        "bi,eio->beo", x[:, :2], p["w"].reshape(2, 2, 3)
    ),
    "repeated by a scan": lambda p, x: jax.lax.scan(
        lambda c, w: (c, x @ w), 0, jnp.broadcast_to(p["w"], (5, 4, 3))
    )[1],
}


@pytest.mark.parametrize("name", JOINED)
def test_a_leaf_that_no_product_reads_as_it_is_stored_is_named_with_a_remedy(name):
    params = {key: jax.random.normal(jax.random.key(0), (4, 3)) for key in ("w", "v")}
    x, pruner = (
        jnp.ones((2, 4)),
        sparsity.WandaPruning(
            sparsity_distribution_fn=sparsity.Uniform(0.5, custom_sparsity_map={"v": None})
        ),
    )
    assert ("w",) not in sparsity.calibrate(JOINED[name], params, [x])
    for sequential in (True, False):
        with pytest.raises(ValueError, match=r"No product reads 'w', .*Store it as its produ"):
            sparsity.oneshot(pruner, JOINED[name], params, [x], sequential=sequential)
    with pytest.raises(ValueError, match=r"no entry \('w',\).*dense with"):
        pruner.instant_sparsify(params, statistics={})


def test_a_weight_that_is_broadcast_along_a_batch_axis_is_pruned_by_all_its_rows():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 4)), rng.normal(size=(3, 5, 6)) * np.geomspace(0.1, 10, 6)

    def model(w, x):
        return jnp.einsum("ebi,eio->ebo", x, jnp.broadcast_to(w, (3, 6, 4)))

    pruner = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    for sequential in (True, False):
        mask, report = sparsity.oneshot(pruner, model, jnp.asarray(w), [x], sequential=sequential)[
            1:
        ]
        scores = np.abs(w) * np.sqrt((x.reshape(-1, 6) ** 2).sum(0))[:, None]
        np.testing.assert_array_equal(mask, scores > np.sort(scores, axis=0)[2])
        assert report[()].count == 15
        lost, total = (np.sum((x @ y) ** 2) for y in (w * (1 - np.asarray(mask)), w))
        np.testing.assert_allclose(report[()].error, lost / total, rtol=1e-5)
