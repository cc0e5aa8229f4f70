"""Every public transformation of the installed optax inside the wrapper, and around it.

They are found by listing optax and optax.contrib, so that a new release is covered: a name that
`build` cannot build fails with that name. docs/optimizers.md shows the verdicts; it is written by
`python -m tests.test_optimizers > docs/optimizers.md`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import DictKey, GetAttrKey

import sparsity
from tests import helpers
from tests.transformations import ADAM, KERNEL, PUBLIC, build

pytestmark = pytest.mark.slow


PAGE = helpers.ROOT / "docs" / "optimizers.md"
_KEPT = 18  # of 60 at a sparsity of 0.7
_STEPS = 4  # masks are updated at steps 1 and 3
_SCHEDULE = sparsity.PeriodicSchedule(2, 1, _STEPS)
_FULL = "regrown weights start afresh"
_WITHOUT = "no state per weight"
_HIDES = {
    "flatten": "refused by updaters that regrow; around the wrapper it hides the layers: an error",
    "lookahead": "refused by updaters that regrow; around the wrapper, call `post_gradient_update` "
    "on `fast` and on `slow`",
}
_MEASURES = "returns measurements, no updates: put it into `monitor`"
_MONITORS = "its state changes its structure in the first step: put it around the wrapper"
_BEFORE = "takes a gradient for each example: put it before the wrapper"


def _updater(algorithm, **options):
    return algorithm(
        sparsity_distribution_fn=helpers.uniform(0.7),
        scheduler=_SCHEDULE,
        **options,
    )


def _extra(name, index, params):
    """Gradients, and all that a transformation of optax may ask for beside them."""
    grads = helpers.params(
        100 + index
    )  # of a linear loss: weights grow whatever the others came to
    loss = lambda params, obj_fn=None: optax.tree.vdot(grads, params)  # noqa: E731
    extra = {"value": loss(params), "grad": grads, "value_fn": loss, "obj_fn": loss}
    return grads, {} if name == "sam" else extra


def _run_steps(name, tx):
    """Trains step by step; yields (params, state) before and after each step."""
    params = helpers.params()
    state = tx.init(params)
    for index in range(_STEPS):
        grads, extra = _extra(name, index, params)
        updates, after = tx.update(grads, state, params, **extra)
        moved = optax.apply_updates(params, updates)
        yield index, (params, state), (moved, after)
        params, state = moved, after


def _assert_sparse(params, masks, kept=_KEPT):
    kernel, mask = np.asarray(params["kernel"]), np.asarray(masks["kernel"])
    assert mask.sum() == kept
    assert np.all(np.isfinite(kernel))
    assert not np.any(kernel.view(np.uint32)[mask == 0])  # +0.0


def _assert_stable(before, after):
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert (jnp.shape(old), jnp.result_type(old)) == (jnp.shape(new), jnp.result_type(new))


def _check_regrowing(name, algorithm, inner):
    """The invariants of SET and RigL; returns the names of the state that stays."""
    # Dense gradients, so that pruned weights have a state that is not fresh.
    tx = _updater(algorithm, is_sparse_gradients=False).wrap_optax(inner)
    regrown, stays, owned = 0, set(), False
    for index, (params, before), (moved, after) in _run_steps(name, tx):
        _assert_sparse(moved, after.masks)
        _assert_stable(before, after)
        if not _SCHEDULE.is_mask_update_iter(index):
            np.testing.assert_array_equal(after.masks["kernel"], before.masks["kernel"])
            continue
        old, new = np.asarray(before.masks["kernel"]), np.asarray(after.masks["kernel"])
        grown = (new == 1) & (old == 0)
        regrown += grown.sum()
        assert not np.any(np.asarray(moved["kernel"])[grown])
        fresh = inner.init(params)
        for (path, was), now, init in zip(
            jax.tree_util.tree_leaves_with_path(before.inner_state),
            *map(jax.tree.leaves, (after.inner_state, fresh)),
            strict=True,
        ):
            if jnp.issubdtype(was.dtype, jax.dtypes.prng_key):
                was, now = jax.random.key_data(was), jax.random.key_data(now)
            is_kernel = DictKey("kernel") in path
            floats = jnp.issubdtype(jnp.result_type(was), jnp.inexact)
            if is_kernel and floats and jnp.shape(was) == helpers.SHAPE:
                was, owned = np.where(grown, init, was), True
            elif floats and (is_kernel or (jnp.ndim(was) and DictKey("bias") not in path)):
                stays.add([entry.name for entry in path if isinstance(entry, GetAttrKey)][-1])
            np.testing.assert_array_equal(now, was, err_msg=jax.tree_util.keystr(path))
    assert regrown
    return stays, owned


def _verdict(name):
    inner = build(name)
    if name == "measure_with_ema":
        with pytest.raises(ValueError, match="The updates have no leaf at 'kernel'"):
            next(_run_steps(name, _updater(sparsity.RigL).wrap_optax(inner)))
        return _MEASURES
    if name == "monitor":
        before = inner.init(helpers.params())
        assert jax.tree.structure(inner.update(helpers.params(), before)[1]) != jax.tree.structure(
            before
        )
        return _MONITORS
    if name in ("differentially_private_aggregate", "dpsgd"):
        tx = _updater(sparsity.RigL).wrap_optax(inner)
        with pytest.raises(ValueError, match=r"'kernel' has shape"):
            tx.update(
                jax.tree.map(lambda p: p[None], helpers.params()),
                tx.init(helpers.params()),
                helpers.params(),
            )
        return _BEFORE
    if name in ("flatten", "lookahead"):
        params = (
            helpers.params()
            if name == "flatten"
            else optax.LookaheadParams.init_synced(helpers.params())
        )
        for algorithm in (sparsity.RigL, sparsity.SET):
            with pytest.raises(ValueError, match=f"optax.{name}"):
                _updater(algorithm).wrap_optax(inner).init(params)
        return _HIDES[name]
    # They regrow weights alike, and take turns.
    algorithm = (sparsity.RigL, sparsity.SET)[list(PUBLIC).index(name) % 2]
    stays, owned = _check_regrowing(name, algorithm, inner)
    tx = _updater(sparsity.MagnitudePruning).wrap_optax(inner)
    for index, (_, before), (moved, after) in itertools.islice(_run_steps(name, tx), 2):
        _assert_sparse(moved, after.masks, _KEPT if index else 60)
        _assert_stable(before, after)
    return "; ".join(
        ([_FULL] if owned else [] if stays else [_WITHOUT])
        + ([f"unchanged: {', '.join(sorted(stays))}"] if stays else [])
    )


def _rows():
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and line.endswith("` |"):
            verdict, names = (cell.strip() for cell in line.strip("|").split("|"))
            for name in names.split(", "):
                yield name.strip("`"), verdict


# Some of them are deprecated, or warn of their own defaults.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_inside_the_wrapper(name):
    verdict = _verdict(name)
    if _page_shows_the_installed_optax():
        assert dict(_rows())[name] == verdict


def _page_shows_the_installed_optax():
    words = PAGE.read_text(encoding="utf-8").split()
    return f"of optax {optax.__version__} " in " ".join(words)


def _page(verdicts):
    """Returns the text of the page for {name: verdict}: verdicts of few transformations first."""
    names = {}
    for name, verdict in sorted(verdicts.items()):
        names.setdefault(verdict, []).append(f"`{name}`")
    rows = [
        f"| {verdict} | {', '.join(names[verdict])} |"
        for verdict in sorted(names, key=lambda verdict: (len(names[verdict]), verdict))
    ]
    return _TEXT.format(version=optax.__version__, count=len(verdicts), rows="\n".join(rows))


_TEXT = """# Optimizers

Nearly every optax transformation may be wrapped. This page lists all {count} public ones
of optax {version} and of its `contrib`, exceptions first.

Inside `wrap_optax`, under RigL, SET and magnitude pruning, all but the exceptions keep exactly
the target number of weights, put every pruned weight at exactly 0.0 (weight decay included), and
keep the structure, shapes and dtypes of their state. Around the wrapper, `chain`, `named_chain`,
`masked`, `partition`, `multi_transform`, `freeze`, `MultiSteps`, `inject_hyperparams` and
`apply_if_finite` do the same.

A weight that RigL or SET regrow starts at zero, with the state that `init` would give it. State
of another shape than the parameter's (factored moments, histories, one number for a tensor)
cannot be divided by weights: such state stays unchanged, and the table names it. Updaters that
regrow weights refuse an optimizer of your own that keeps arrays of a parameter's shape outside of
trees like the parameters, such as in a list. `split_real_and_imaginary` does so for complex
parameters; Adam takes these without it.

| state when weights regrow | transformations |
| --- | --- |
{rows}

Written by `python -m tests.test_optimizers > docs/optimizers.md`; the tests compare it.
"""


def _around(wrapped):
    """Combinators around the wrapped transformation `wrapped(rate)`."""
    tx, adam = wrapped(0.1), ADAM()
    labels = {"kernel": "a", "bias": "b"}
    return {
        "chain": optax.chain(optax.clip(1.0), tx),
        "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("sparse", tx)),
        "masked": optax.masked(tx, KERNEL),
        "partition": optax.partition({"a": tx, "b": adam}, labels),
        "multi_transform": optax.multi_transform({"a": tx, "b": adam}, labels),
        "freeze": optax.chain(tx, optax.freeze({"kernel": False, "bias": True})),
        "MultiSteps": optax.MultiSteps(tx, 1).gradient_transformation(),
        "inject_hyperparams": optax.inject_hyperparams(wrapped)(0.1),
        "apply_if_finite": optax.apply_if_finite(tx, 3),
    }


def test_flatten_around_the_wrapper_is_an_error():
    tx = optax.flatten(_updater(sparsity.MagnitudePruning).wrap_optax(ADAM()))
    with pytest.raises(ValueError, match="nothing to remove"):
        tx.init(helpers.params())


def test_lookahead_around_the_wrapper_needs_post_gradient_update_on_fast_and_slow():
    updater = _updater(sparsity.MagnitudePruning)
    tx = optax.lookahead(updater.wrap_optax(ADAM()), 2, 0.5)
    zeros = {}
    for clean in (False, True):
        params = optax.LookaheadParams.init_synced(helpers.params())
        state = tx.init(params)
        for step in range(_STEPS):
            updates, state = jax.jit(tx.update)(helpers.params(100 + step), state, params)
            params = optax.apply_updates(params, updates)
            if clean:
                params = optax.LookaheadParams(
                    *(updater.post_gradient_update(half, state) for half in params)
                )
        zeros[clean] = [int((half["kernel"] == 0).sum()) for half in params]
    assert max(zeros[False]) < 60 - _KEPT  # why the page asks for it
    assert zeros[True] == [60 - _KEPT] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["differentially_private_aggregate", "dpsgd"])
def test_gradients_for_each_example_are_aggregated_before_the_wrapper(name):
    tx = optax.chain(build(name), _updater(sparsity.RigL).wrap_optax(optax.sgd(1.0)))
    params = helpers.params()
    state = tx.init(params)
    for step in range(_STEPS):
        examples = jax.tree.map(lambda *g: jnp.stack(g), *map(helpers.params, (step, step + 9)))
        updates, state = tx.update(examples, state, params)
        params = optax.apply_updates(params, updates)
        _assert_sparse(params, sparsity.get_sparse_state(state).masks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_monitor_and_what_it_measures_stand_around_the_wrapper():
    tx = optax.chain(_updater(sparsity.RigL).wrap_optax(ADAM()), build("monitor"))
    params = helpers.params()
    state = tx.init(params)
    for step in range(_STEPS):
        updates, state = tx.update(helpers.params(100 + step), state, params)
        params = optax.apply_updates(params, updates)
        _assert_sparse(params, sparsity.get_sparse_state(state).masks)
    assert float(optax.tree.get(state, "norm")) > 0


@pytest.mark.parametrize("around", _around(lambda rate: optax.identity()))
@pytest.mark.parametrize("algorithm", [sparsity.RigL, sparsity.SET, sparsity.MagnitudePruning])
def test_around_the_wrapper(algorithm, around):
    updater = _updater(algorithm)
    tx = _around(lambda rate: updater.wrap_optax(optax.adamw(rate, weight_decay=0.1)))[around]
    regrows = algorithm is not sparsity.MagnitudePruning

    def train(params):
        def body(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, sparsity.get_sparse_state(state).masks)

        return jax.lax.scan(body, (params, tx.init(params)), grads)

    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(helpers.params, range(100, 104)))
    (params, state), seen = jax.jit(train)(helpers.params())
    for index in range(_STEPS):
        moved, masks = jax.tree.map(lambda leaf, i=index: leaf[i], seen)
        _assert_sparse(moved, masks, _KEPT if index or regrows else 60)
    first, last = seen[1]["kernel"][0], seen[1]["kernel"][-1]
    assert np.any((last == 1) & (first == 0)) == regrows
    assert updater.pre_forward_update(params, state) is params
    jax.tree.map(np.testing.assert_array_equal, updater.post_gradient_update(params, state), params)
    assert sparsity.summarize_sparsity(state)["kernel"] == 0.7
    assert sparsity.summarize_intersection(state, state)["_total_intersection"] == 1.0
    assert "0.7000" in sparsity.sparsity_table(params, state, updater)


def test_the_page_lists_the_installed_optax():
    if not _page_shows_the_installed_optax():
        pytest.skip("docs/optimizers.md shows another release of optax")
    assert sorted(PUBLIC) == sorted(name for name, _ in _rows())
    assert PAGE.read_text(encoding="utf-8") == _page(dict(_rows()))


if __name__ == "__main__":
    print(_page({name: _verdict(name) for name in PUBLIC}), end="")
