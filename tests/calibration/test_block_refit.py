"""Blocks trained to the outputs of the dense blocks: never worse, masks kept, any optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.calibration import ADMM, BlockRefit
from sparsity.core.names import name_blocks

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)


PARAMS = {f"layers_{i}": {"kernel": draw(16, 16), "bias": jnp.zeros(16)} for i in range(3)}
PARAMS["head"] = {"kernel": draw(16, 4)}
MIX = draw(16, 16)
X = [draw(64, 16) @ MIX for _ in range(6)]


def model(params, x):
    for i in range(3):
        layer = params[f"layers_{i}"]
        x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params["head"]["kernel"]


def make_pruner(cls=sparsity.WandaPruning, **options):
    return cls(sparsity_distribution_fn=sparsity.Uniform(0.6), **options)


def measure(params):
    lost = sum(float(jnp.sum((model(params, x) - model(PARAMS, x)) ** 2)) for x in X)
    return lost / sum(float(jnp.sum(model(PARAMS, x) ** 2)) for x in X)


@pytest.mark.parametrize("inputs", ["pruned", "dense"])
@pytest.mark.parametrize("window", [1, 2, 9])
def test_a_refit_of_blocks_lowers_the_error_of_the_model_and_keeps_masks(window, inputs):
    plain, masks, before = sparsity.oneshot(make_pruner(), model, PARAMS, X)
    refit = BlockRefit(steps=48, learning_rate=1e-2, window=window, inputs=inputs)
    pruned, _, report = sparsity.oneshot(make_pruner(), model, PARAMS, X, refit)
    assert measure(pruned) < 0.8 * measure(plain)
    assert report.outputs.error == pytest.approx(measure(pruned), rel=1e-3)
    assert report.outputs.error < before.outputs.error
    first = report.blocks[next(iter(report.blocks))]
    assert first[1] < first[0]
    kernel, mask = pruned["layers_0"]["kernel"], masks["layers_0"]["kernel"]
    np.testing.assert_array_equal(kernel == 0, mask == 0)  # the mask of the pruner


@pytest.mark.parametrize("learning_rate", [0.0, 1e3])
def test_no_block_gets_worse(learning_rate):
    refit = BlockRefit(steps=3, learning_rate=learning_rate)
    plain, _, _ = sparsity.oneshot(make_pruner(), model, PARAMS, X, ADMM())
    pruned, _, report = sparsity.oneshot(make_pruner(), model, PARAMS, X, (ADMM(), refit))
    assert all(after <= before for before, after in report.blocks.values())
    if learning_rate == 0:
        jax.tree.map(np.testing.assert_array_equal, plain, pruned)


PATTERNS = {
    "2:4": sparsity.NByM(2, 4, axis=0),
    "blocks": sparsity.Block((4, 4)),
    "fan-in": sparsity.FanIn(4, axis=0),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_stay(name):
    pruner = make_pruner(sparsity.MagnitudePruning, sparsity_type=PATTERNS[name])
    _, masks, _ = sparsity.oneshot(pruner, model, PARAMS, X)
    pruned, refitted, _ = sparsity.oneshot(pruner, model, PARAMS, X, BlockRefit(steps=4))
    jax.tree.map(np.testing.assert_array_equal, masks, refitted)
    for i in range(3):
        kernel, mask = pruned[f"layers_{i}"]["kernel"], masks[f"layers_{i}"]["kernel"]
        assert not np.any(np.asarray(kernel)[np.asarray(mask) == 0])


def test_any_optimizer_trains_biases_on_request_with_any_number_of_batches_a_step():
    refit = BlockRefit(
        steps=8,
        rows=None,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9)),
        filter_fn=lambda path, _: path[-1] == "bias",
    )
    pruned, _, report = sparsity.oneshot(make_pruner(), model, PARAMS, X, refit)
    assert np.any(np.asarray(pruned["layers_1"]["bias"]))
    assert report.outputs is not None


def test_a_block_of_bfloat16_keeps_its_dtype():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    batches = [x.astype(jnp.bfloat16) for x in X]
    refit = BlockRefit(steps=8, learning_rate=1e-2)
    pruned, _, report = sparsity.oneshot(make_pruner(), model, params, batches, refit)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(pruned))
    assert all(after <= before for before, after in report.blocks.values())


def test_blocks_are_named_by_the_first_number_or_by_the_user():
    names = {
        ("model.layers.12.mlp.up.weight",): "model.layers.12",
        ("layers", "0", "kernel"): "layers/0",
        ("Dense_3", "kernel"): "Dense_3",
        ("conv1", "kernel"): "conv1/kernel",
    }
    assert name_blocks(names) == names
    nested = [("Net_0", f"Block_{i}", f"Dense_{j}") for i in range(2) for j in range(2)]
    assert {*name_blocks(nested).values()} == {"Net_0/Block_0", "Net_0/Block_1"}
    _, _, report = sparsity.oneshot(
        make_pruner(), model, PARAMS, X, BlockRefit(steps=1), blocks=lambda path: path[0][:6]
    )
    assert [*report.blocks] == ["layers", "head"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"window": 1.5}, "window must be an integer"),
        ({"inputs": "both"}, "inputs must be 'pruned' or 'dense'"),
        ({"held": 1.0}, "held must be below 1"),
        ({"optimizer": 3}, "optimizer must be"),
    ],
)
def test_fields_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BlockRefit(**options)


def test_other_orders_and_modes_are_refused():
    for refit in ((BlockRefit(), ADMM()), (ADMM(), ADMM()), (BlockRefit(), BlockRefit())):
        with pytest.raises(ValueError, match="refit takes one refit of matrices"):
            sparsity.oneshot(make_pruner(), model, PARAMS, X, refit)
    with pytest.raises(ValueError, match="BlockRefit need sequential = True"):
        sparsity.oneshot(make_pruner(), model, PARAMS, X, BlockRefit(), False)


def test_a_block_whose_outputs_are_not_finite_is_named():
    def overflow(params, x):
        return jnp.exp(1e4 * jnp.abs(x @ params["a"])) @ params["b"]

    params = {"a": draw(16, 16), "b": draw(16, 4)}
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    with pytest.raises(ValueError, match=r"'a' are not finite|inputs of 'b' are not all finite"):
        sparsity.oneshot(pruner, overflow, params, X, BlockRefit(steps=1))
