"""Runs that strangers tried, against masking, against a fresh run, and against rows left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsity
from sparsity.calibration import BlockRefit

RNG = np.random.default_rng(0)
ALL = sparsity.Uniform(0.5, filter_fn=lambda path, leaf: leaf.ndim >= 2)
WANDA = sparsity.WandaPruning(sparsity_distribution_fn=ALL)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32) / np.float32(shape[0]) ** 0.5


def measure(fn, dense, pruned, batches):
    """The relative squared error of all outputs."""
    pruned = jax.tree.map(jnp.asarray, pruned)
    pairs = [(fn(dense, x), fn(pruned, x)) for x in batches]
    lost, total = (
        float(sum(map(jnp.sum, x)))
        for x in zip(*(((y - z) ** 2, y**2) for y, z in pairs), strict=True)
    )
    return lost / total


def chain(params, x):
    for weights in params.values():
        x = jnp.tanh(x @ weights)
    return x


def tied(params, tokens):
    x = params["embed"][tokens]
    return jnp.tanh(x @ params["w"]) @ params["embed"].T


TIED = {"embed": draw(12, 8), "w": draw(8, 8)}
TOKENS = [np.arange(12), np.arange(3, 12)]


def test_blocks_of_one_name_are_both_written(tmp_path):
    params = {name: draw(8, 8) for name in ("layers.0.a", "layers.1.b", "layers.0.c")}
    batches = [draw(16, 8) for _ in range(2)]
    expected = sparsity.oneshot(WANDA, chain, params, batches)
    written = sparsity.oneshot(WANDA, chain, params, batches, out=tmp_path / "run")
    for i in range(2):
        for name in params:
            np.testing.assert_array_equal(written[i][name][...], expected[i][name])


def test_a_single_batch_is_trained_and_held_out():
    params = {f"l.{i}": draw(8, 8) for i in range(2)}
    _, _, report = sparsity.oneshot(
        WANDA, chain, params, [draw(64, 8)], BlockRefit(steps=16, learning_rate=1e-2)
    )
    assert all(0 < after < before for before, after in report.blocks.values())


def test_rows_of_weight_0_may_be_nan_and_count_nowhere():
    params = {f"l.{i}": draw(8, 8) for i in range(2)}
    batches = [draw(16, 8) for _ in range(4)]
    refit = BlockRefit(steps=8, learning_rate=1e-2, held=0.5)
    expected = sparsity.oneshot(WANDA, chain, params, batches, refit)
    padding = np.full((3, 8), np.nan, np.float32)
    padded = [np.concatenate([x, padding]) for x in batches]
    padded += [np.full((19, 8), np.nan, np.float32)]  # none of its rows counts
    actual = sparsity.oneshot(
        WANDA, chain, params, padded, refit, row_weights=lambda x: ~np.isnan(x[:, 0])
    )
    for name in params:
        np.testing.assert_array_equal(actual[1][name], expected[1][name])
        np.testing.assert_allclose(actual[0][name], expected[0][name], atol=1e-5)
        np.testing.assert_allclose(actual[2].blocks[name], expected[2].blocks[name], rtol=1e-4)
    np.testing.assert_allclose(actual[2].outputs.error, expected[2].outputs.error, rtol=1e-4)


def test_windows_of_a_scan_read_arrays_of_numpy():
    params = {"w": draw(4, 8, 8), "norm": np.ones((4, 8), np.float32)}

    def model(params, x):
        step = lambda x, layer: (x + jnp.tanh(x * layer["norm"] @ layer["w"]), None)  # noqa: E731
        return lax.scan(step, x, params)[0]

    batches, refit = [draw(16, 8) for _ in range(3)], BlockRefit(steps=4, window=2)
    pruner = sparsity.WandaPruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda path, _: path[-1] == "w")
    )
    expected = sparsity.oneshot(pruner, model, jax.tree.map(jnp.asarray, params), batches, refit)
    actual = sparsity.oneshot(pruner, model, params, batches, refit)
    np.testing.assert_array_equal(actual[0]["w"], expected[0]["w"])


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_without_sequence_a_run_reads_and_writes_folders(tmp_path, source):
    params = {f"l.{i}": draw(8, 8) for i in range(3)}
    batches = [draw(16, 8) for _ in range(2)]
    expected = sparsity.oneshot(WANDA, chain, params, batches, sequential=False)
    np.savez(tmp_path / "dense.npz", **params)
    given = params if source == "memory" else tmp_path / "dense.npz"
    for _ in range(2):  # the second continues
        pruned, masks, report = sparsity.oneshot(
            WANDA, chain, given, batches, sequential=False, out=tmp_path / "run"
        )
        for name in params:
            np.testing.assert_array_equal(pruned[name][...], expected[0][name])
            np.testing.assert_array_equal(masks[name][...], expected[1][name])
        assert report.outputs == expected[2].outputs


def test_a_filter_trains_no_parameter_that_an_earlier_block_has_read():
    params = {"l.0": draw(8, 8), "l.1": draw(8, 8), "norm": np.ones(8, np.float32)}

    def model(params, x):
        for name in ("l.0", "l.1"):
            x = jnp.tanh(x * params["norm"] @ params[name])
        return x

    batches = [1 + draw(64, 8) for _ in range(4)]  # correlated: the others can make up
    refit = BlockRefit(steps=32, learning_rate=3e-3, filter_fn=lambda *_: True)
    pruned, _, report = sparsity.oneshot(WANDA, model, params, batches, refit)
    assert (pruned["norm"] != 1).any()  # in the first block
    np.testing.assert_allclose(
        report.outputs.error, measure(model, params, pruned, batches), rtol=1e-4
    )


def test_a_weight_that_all_steps_of_a_scan_share_keeps_its_mask():
    params = {"w": draw(3, 8, 8), "v": draw(8, 8)}

    def model(params, x):
        step = lambda x, w: (jnp.tanh(x @ w @ params["v"]), None)  # noqa: E731
        return lax.scan(step, x, params["w"])[0]

    refit = BlockRefit(steps=4, learning_rate=1e-2, filter_fn=lambda *_: True)
    pruned, masks, _ = sparsity.oneshot(WANDA, model, params, [draw(16, 8), draw(16, 8)], refit)
    for name in params:
        assert not np.asarray(pruned[name])[np.asarray(masks[name]) == 0].any()
        assert (np.asarray(pruned[name]) == 0).mean() == 0.5


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"out": "run"}], ids=str)
def test_errors_of_tied_weights_are_those_of_the_pruned_model(tmp_path, options):
    options = {name: tmp_path / x if name == "out" else x for name, x in options.items()}
    dense = jax.tree.map(jnp.array, TIED)
    for _ in range(1 if options.get("donate") else 2):  # the second continues
        pruned, _, report = sparsity.oneshot(WANDA, tied, dense, TOKENS, **options)
        expected = measure(tied, TIED, {n: x[...] for n, x in pruned.items()}, TOKENS)
        np.testing.assert_allclose(report.outputs.error, expected, rtol=1e-4)


def test_donated_arrays_may_be_read_again_and_lie_at_two_paths():
    shared = jnp.asarray(draw(8, 8))
    params = {"a": shared, "b": shared, "c": jnp.asarray(draw(8, 8))}
    host = jax.tree.map(np.array, params)

    def model(params, x):
        x = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        return x @ params["c"] + jnp.abs(params["c"]).sum()

    batches = [draw(16, 8)]
    pruned, _, report = sparsity.oneshot(WANDA, model, params, batches, donate=True)
    np.testing.assert_allclose(
        report.outputs.error, measure(model, host, pruned, batches), rtol=1e-4
    )
    assert not shared.is_deleted()


def scale_inputs(scale):
    return lambda params, x: chain(params, x * scale)


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("model", {"fn": scale_inputs(0.1)}),
        ("model", {"fn": scale_inputs(np.geomspace(1, 9, 8, dtype=np.float32))}),
        ("model", {"fn": lambda params, x: chain({n: w.T for n, w in params.items()}, x)}),
        ("row_weights", {"row_weights": lambda x: np.arange(16) < 9}),
        ("blocks", {"blocks": lambda path: "one"}),
        ("refit", {"refit": BlockRefit(steps=2, filter_fn=lambda path, _: path[-1] == "l.1")}),
    ],
)
def test_a_run_does_not_continue_with_changed_arguments(tmp_path, what, changed):
    params = {f"l.{i}": draw(8, 8) for i in range(2)}
    arguments = {
        "fn": scale_inputs(3.0),
        "row_weights": lambda x: np.arange(16) < 8,
        "blocks": lambda path: path[-1],
        "refit": BlockRefit(steps=2, filter_fn=lambda path, _: False),
    }
    batches = [draw(16, 8) for _ in range(2)]
    run = lambda given: sparsity.oneshot(  # noqa: E731
        WANDA, params=params, batches=batches, out=tmp_path / "run", **given
    )
    run(arguments)
    with pytest.raises(ValueError, match=f"'{what}' differ"):
        run(arguments | changed)
    run(arguments)


def test_what_is_not_finite_or_fits_no_file_is_named(tmp_path):
    params = {"l.0": draw(8, 8), "l.1": draw(8, 8)}
    batches = [draw(16, 8) for _ in range(3)]
    bad = {**params, "l.1": np.where(np.eye(8) > 0, np.nan, params["l.1"]).astype(np.float32)}
    with pytest.raises(ValueError, match=r"'l\.1' has weights that are NaN"):
        sparsity.oneshot(WANDA, chain, bad, batches)

    def model(params, x):
        x = x @ params["l.0"]
        return jnp.log(x[:, 0:1]) + x @ params["l.1"]

    with pytest.raises(ValueError, match=r"outputs of the block 'l\.\d' are not finite in batch 0"):
        sparsity.oneshot(WANDA, model, params, batches, BlockRefit(steps=2))
    with pytest.raises(ValueError, match=r"'rng' is key.*Leave random keys out"):
        sparsity.oneshot(
            WANDA,
            lambda p, x: x @ p["w"],
            {"w": params["l.0"], "rng": jax.random.key(0)},
            batches,
            out=tmp_path / "keys",
        )
    wide = {"w": params["l.0"].astype(np.float64)}
    with pytest.raises(ValueError, match=r"'w' is float64"):
        sparsity.oneshot(WANDA, lambda p, x: x @ p["w"], wide, batches, out=tmp_path / "wide")
    _, _, report = sparsity.oneshot(
        WANDA, lambda p, x: (x @ p["w"]).argmax(-1), {"w": params["l.0"]}, batches
    )
    assert report.outputs is None  # integers have no squared error


def test_refusals_come_before_a_layer_is_pruned(tmp_path):
    params = {"l.0": draw(8, 8)}
    for batches in ("abc", {"x": draw(4, 8)}):
        with pytest.raises(ValueError, match="batches must be a list"):
            sparsity.oneshot(WANDA, chain, params, batches)
    for name in (None, ""):
        with pytest.raises(ValueError, match=r"blocks\(\('l.0',\)\) must be the name of a block"):
            sparsity.oneshot(WANDA, chain, params, [draw(4, 8)], blocks=lambda path, n=name: n)
    with pytest.raises(TypeError) as failure:
        sparsity.oneshot(WANDA, chain, params, [draw(4, 8), draw(4, 7)])
    assert "batches[1]" in "".join(failure.value.__notes__)
    with pytest.raises(ValueError, match="0 for all rows of all held"):
        sparsity.oneshot(
            WANDA,
            chain,
            params,
            [draw(4, 8)],
            held=[draw(3, 8)],
            row_weights=lambda x: np.full(len(x), len(x) > 3),
        )

    def refuse(*_):
        raise RuntimeError("no filter")

    with pytest.raises(RuntimeError, match="no filter"):
        sparsity.oneshot(
            WANDA, chain, params, [draw(4, 8)], BlockRefit(filter_fn=refuse), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_a_failure_in_the_middle_says_how_to_go_on(tmp_path):
    params = {"l.0": draw(8, 8), "l.1": draw(8, 8)}

    def model(params, x):
        return jnp.log(x @ params["l.0"]) @ params["l.1"]

    with pytest.raises(ValueError, match="not all finite") as failure:
        sparsity.oneshot(WANDA, model, params, [draw(16, 8)], out=tmp_path / "run")
    assert "keeps the 1 finished blocks: the same call" in failure.value.__notes__[-1]
