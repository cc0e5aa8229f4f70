"""Rates of single slices of a stack: masks are those of the slices, each pruned alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.calibration import Rates

RATES = np.array([0.25, 0.5, 0.75])
STACK = jax.random.normal(jax.random.key(0), (3, 8, 8))
X = jax.random.normal(jax.random.key(1), (40, 8))
PATTERNS = [
    sparsity.Unstructured(),
    sparsity.NByM(2, 4, axis=-2),
    sparsity.Block((2, 2)),
    sparsity.Channel(),
    sparsity.FanIn(axis=-2),
]


def apply(params, x):
    return jnp.einsum("bi,lio->lbo", x, params["w"])


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("cls", [sparsity.MagnitudePruning, sparsity.WandaPruning])
def test_each_slice_is_pruned_at_its_rate_as_if_alone(cls, pattern):
    def prune(model, w, rate, **options):
        statistics = sparsity.calibrate(model, {"w": w}, [X])
        extra = {} if cls is sparsity.MagnitudePruning else {"statistics": statistics}
        rates = Rates({("w",): rate})
        pruner = cls(sparsity_distribution_fn=rates, sparsity_type=pattern, **options)
        return pruner.instant_sparsify({"w": w}, **extra)[1]["w"]

    masks = prune(apply, STACK, RATES, batch_axes=1)
    for mask, w, rate in zip(masks, STACK, RATES, strict=True):
        alone = prune(lambda p, x: x @ p["w"], w, float(rate))
        np.testing.assert_array_equal(mask, alone)


def test_a_ramp_ends_at_the_rate_of_each_slice():
    schedule = sparsity.sparsity_schedules.PolynomialSchedule(
        update_freq=1, update_start_step=0, update_end_step=4
    )
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=Rates({("w",): RATES}), batch_axes=1, scheduler=schedule
    )
    tx = pruner.wrap_optax(optax.sgd(0.1))
    params, state = {"w": STACK}, tx.init({"w": STACK})

    @jax.jit
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(6):
        params, state = step(params, state)
    np.testing.assert_array_equal(np.mean(np.asarray(params["w"]) == 0, (1, 2)), RATES)
    assert "0.5000" in sparsity.sparsity_table(params, state, pruner)


@pytest.mark.parametrize("cls", [sparsity.WandaPruning, sparsity.SparseGPTPruning])
def test_layers_of_a_scan_have_rates_of_their_own(cls):
    def scanned(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    pruner = cls(sparsity_distribution_fn=Rates({("w",): RATES}))
    _, masks, _ = sparsity.oneshot(pruner, scanned, {"w": STACK}, [X])
    np.testing.assert_array_equal(1 - np.mean(np.asarray(masks["w"]), (1, 2)), RATES)


def test_owl_gives_slices_of_a_stack_the_rates_of_single_layers():
    scan = lambda p, x: jax.lax.scan(lambda x, w: (x, x @ w), x, p["w"])[1]  # noqa: E731
    seen = sparsity.calibrate(scan, {"w": STACK}, [X])
    stacked = sparsity.owl(seen, {"w": STACK}, threshold=2.0)({"w": STACK})["w"]
    layers = {f"w{i}": w for i, w in enumerate(STACK)}
    model = lambda p, x: [x @ w for w in p.values()]  # noqa: E731
    seen = sparsity.calibrate(model, layers, [X])
    single = sparsity.owl(seen, layers, threshold=2.0)(layers)
    np.testing.assert_allclose(stacked, [*single.values()], rtol=1e-6)
    np.testing.assert_allclose(np.mean(stacked), 0.6, rtol=1e-6)


def test_norms_of_scanned_layers_stay_dense_unless_they_are_chosen():
    params = {"w": STACK, "norm": jnp.ones((3, 8))}

    def scanned(params, x):
        def step(x, layer):
            return jnp.tanh(x * layer["norm"] @ layer["w"]), None

        return jax.lax.scan(step, x, params)[0]

    half = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    with pytest.warns(UserWarning, match="oneshot leaves 'norm' dense: no product reads"):
        _, masks, report = sparsity.oneshot(half, scanned, params, [X])
    assert masks["norm"] is None
    assert [*report] == [("w",)]
    chosen = sparsity.Uniform(0.5, custom_sparsity_map={"norm": 0.5})
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=chosen)
    with pytest.raises(ValueError, match="No product reads 'norm'"):
        sparsity.oneshot(pruner, scanned, params, [X])


@pytest.mark.parametrize(
    ("rates", "options", "message"),
    [
        (np.array([0.5, 0.5]), {"batch_axes": 1}, r"must be one number, or one for each slice"),
        (np.array([0.5, 0.5, 1.5]), {"batch_axes": 1}, r"the sparsity of 'w' must be in \[0, 1\]"),
        (
            RATES,
            {},
            r"'w' has sparsities of shape \(3,\), one for each slice, and needs batch_axes",
        ),
    ],
)
def test_rates_that_fit_no_slices_are_refused_by_path(rates, options, message):
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=lambda params: {"w": rates}, **options
    )
    with pytest.raises(ValueError, match=message):
        pruner.instant_sparsify({"w": STACK})
