"""A run from disk, to disk, interrupted or in memory gives the same bits; see `oneshot(out=)`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sparsity
from sparsity.calibration import ADMM, BlockRefit, open_checkpoint
from sparsity.calibration.run.frames import Frame

RNG = np.random.default_rng(0)
NUM_LAYERS = 4


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape) / 4, jnp.float32)


STACKED = {
    "layers": {"up": draw(NUM_LAYERS, 16, 32), "down": draw(NUM_LAYERS, 32, 16)},
    "head": draw(16, 8),
}
BATCHES = [draw(20, 16), draw(20, 16), draw(7, 16)]
ALL = sparsity.Uniform(0.5, filter_fn=lambda path, _: True)
WANDA = sparsity.WandaPruning(sparsity_distribution_fn=ALL)
GPT = sparsity.SparseGPTPruning(sparsity_distribution_fn=ALL)


def scanned(params, x):
    def step(x, layer):
        return x + jax.nn.relu(x @ layer["up"]) @ layer["down"], None

    return jax.lax.scan(step, x, params["layers"])[0] @ params["head"]


def name_flat(params):
    names = sparsity.core.trees.leaves_by_names(params)
    return {"/".join(path): np.asarray(array) for path, array in names.items()}


def flat(params, x):
    layers = {name: params[f"layers/{name}"] for name in ("up", "down")}
    return scanned({"layers": layers, "head": params["head"]}, x)


def unrolled(params, x):
    for i in range(NUM_LAYERS):
        x = x + jax.nn.relu(x @ params[f"layers.{i}.up"]) @ params[f"layers.{i}.down"]
    return x @ params["head"]


UNROLLED = {
    f"layers.{i}.{name}": array[i] for name, array in STACKED["layers"].items() for i in range(4)
} | {"head": STACKED["head"]}

REFITS = {
    "none": None,
    "matrices": ADMM(),
    "blocks": BlockRefit(steps=4),
    "both": (ADMM(), BlockRefit(steps=4, window=2)),
}


def assert_equal(one, other):
    ones, others = jax.tree.leaves(one), jax.tree.leaves(other)
    for x, y in zip(ones, others, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("refit", REFITS)
@pytest.mark.parametrize("pruner", [WANDA, GPT], ids=["wanda", "gpt"])
def test_disk_and_memory_and_interruptions_give_the_same_bits(tmp_path, pruner, refit):
    expected = sparsity.oneshot(pruner, scanned, STACKED, BATCHES, REFITS[refit])
    out = tmp_path / "run"
    written = sparsity.oneshot(pruner, scanned, STACKED, BATCHES, REFITS[refit], out=out)
    assert_equal(written[:2], expected[:2])
    journal = (out / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for done in range(1, len(journal) + 1):  # killed within the line after these
        (out / "journal.jsonl").write_bytes(b"".join(journal[:done]) + b'{"block"')
        resumed = sparsity.oneshot(pruner, scanned, STACKED, BATCHES, REFITS[refit], out=out)
        assert_equal(resumed[:2], expected[:2])
        assert resumed[2].outputs == expected[2].outputs
        assert dict(resumed[2].blocks) == dict(expected[2].blocks)
        errors = [{k: v.error for k, v in r.items()} for r in (resumed[2], expected[2])]
        assert errors[0] == errors[1]
    save_file(name_flat(STACKED), tmp_path / "dense.safetensors")
    streamed = sparsity.oneshot(
        pruner, flat, tmp_path / "dense.safetensors", BATCHES, REFITS[refit], out=tmp_path / "other"
    )
    assert_equal(streamed[0], name_flat(expected[0]))
    assert_equal(load_file(tmp_path / "other/masks.safetensors"), name_flat(expected[1]))


@pytest.mark.parametrize("refit", REFITS)
def test_layers_of_a_scan_and_layers_in_a_row_are_the_same_blocks(refit):
    scan = sparsity.oneshot(GPT, scanned, STACKED, BATCHES, REFITS[refit])
    rows = sparsity.oneshot(GPT, unrolled, UNROLLED, BATCHES, REFITS[refit])
    for i in range(NUM_LAYERS):
        for name in ("up", "down"):
            np.testing.assert_allclose(
                scan[0]["layers"][name][i], rows[0][f"layers.{i}.{name}"], rtol=1e-4, atol=1e-5
            )
    errors = [[*run[2].blocks.values()] for run in (scan, rows)]
    np.testing.assert_allclose(*errors, rtol=1e-3, atol=1e-6)


def test_donated_arrays_are_deleted_and_give_the_same_bits():
    expected = sparsity.oneshot(WANDA, scanned, STACKED, BATCHES, ADMM())
    params = jax.tree.map(jnp.copy, STACKED)
    pruned, masks, report = sparsity.oneshot(WANDA, scanned, params, BATCHES, ADMM(), donate=True)
    assert_equal((pruned, masks), expected[:2])
    assert report.outputs == expected[2].outputs
    assert params["layers"]["up"].is_deleted()


def test_no_weight_is_copied_to_be_transposed(monkeypatch):
    params = {f"layers.{i}.w": draw(24, 16 if i == 0 else 24) for i in range(3)}
    params["tied"] = draw(40, 16)
    shapes = set()

    def model(params, tokens):
        x = params["tied"][tokens]
        for i in range(3):
            x = jnp.tanh(x @ params[f"layers.{i}.w"].T)
        return x[:, :16] @ params["tied"].T

    read_value = Frame.read_value

    def read_and_look(frame, batch, value):
        result = read_value(frame, batch, value)
        shapes.update(x.shape for x in jax.live_arrays())
        return result

    monkeypatch.setattr(Frame, "read_value", read_and_look)
    matrices = sparsity.Uniform(0.5, filter_fn=lambda path, _: path != ("tied",))
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=matrices)
    sparsity.oneshot(pruner, model, params, [jnp.arange(9), jnp.arange(30, 40)])
    assert (40, 16) in shapes
    assert shapes.isdisjoint({(16, 40), (16, 24)})


def test_bfloat16_and_shards_of_hugging_face_are_read_and_written(tmp_path):
    arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in name_flat(STACKED).items()}
    folder = tmp_path / "model"
    folder.mkdir()
    shards = {"layers/up": "a.safetensors", "layers/down": "b.safetensors", "head": "b.safetensors"}
    for shard in ("a.safetensors", "b.safetensors"):
        chosen = {n: np.asarray(x) for n, x in arrays.items() if shards[n] == shard}
        save_file(chosen, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (folder / "config.json").write_text("{}")
    batches = [x.astype(jnp.bfloat16) for x in BATCHES]
    out = tmp_path / "out"
    pruned, _, _ = sparsity.oneshot(WANDA, flat, folder, batches, out=out)
    expected, _, _ = sparsity.oneshot(WANDA, flat, arrays, batches)
    assert_equal(pruned, expected)
    assert (out / "config.json").read_text() == "{}"
    assert open_checkpoint(out)["head"].dtype == jnp.bfloat16
    # Refused by name
    index.write_text(json.dumps({"weight_map": shards | {"head": "../b.safetensors"}}))
    with pytest.raises(ValueError, match="not in its folder"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": shards | {"head": "c.safetensors"}}))
    with pytest.raises(ValueError, match=r"'c.safetensors', which .* lacks"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": shards | {"head": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"'head' in 'a.safetensors', which lacks"):
        open_checkpoint(folder)
    data = (folder / "a.safetensors").read_bytes()
    for size in (4, 40, len(data) - 1):
        (folder / "a.safetensors").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"a\.safetensors cannot be read"):
            open_checkpoint(folder / "a.safetensors")


def test_npz_and_orbax_are_read_slice_by_slice(tmp_path):
    import orbax.checkpoint

    np.savez(tmp_path / "model.npz", **name_flat(STACKED))
    orbax.checkpoint.PyTreeCheckpointer().save(tmp_path / "orbax", STACKED)
    expected = STACKED["layers"]["up"][2]
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "model.npz")["layers/up"][2], expected)
    tree = open_checkpoint(tmp_path / "orbax")
    np.testing.assert_array_equal(tree["layers"]["up"][2], expected)
    run = sparsity.oneshot(WANDA, scanned, tree, BATCHES)
    assert_equal(run[:2], sparsity.oneshot(WANDA, scanned, STACKED, BATCHES)[:2])


def test_another_run_or_other_files_are_refused_and_nothing_is_lost(tmp_path):
    out = tmp_path / "run"
    sparsity.oneshot(WANDA, scanned, STACKED, BATCHES, out=out)
    before = (out / "model.safetensors").read_bytes()
    for change, name in (
        ({"pruner": GPT}, "pruner"),
        ({"refit": ADMM()}, "refit"),
        ({"batches": BATCHES[:2]}, "batches"),
        ({"params": jax.tree.map(lambda x: x + 1, STACKED)}, "params"),
        ({"row_weights": np.ones(20)}, "row_weights"),
    ):
        arguments = {"pruner": WANDA, "params": STACKED, "batches": BATCHES} | change
        if name == "row_weights":
            arguments["batches"] = BATCHES[:2]
        with pytest.raises(ValueError, match=f"holds another run: .*'{name}'"):
            sparsity.oneshot(fn=scanned, out=out, **arguments)
    assert (out / "model.safetensors").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        sparsity.oneshot(WANDA, scanned, STACKED, BATCHES, out=tmp_path / "full")
    with pytest.raises(ValueError, match="is a file"):
        sparsity.oneshot(WANDA, scanned, STACKED, BATCHES, out=tmp_path / "full/notes.txt")


def test_a_run_that_fails_in_the_middle_keeps_what_is_done(tmp_path):
    out, broken = tmp_path / "run", {**STACKED, "head": STACKED["head"].at[0].set(jnp.inf)}
    expected = sparsity.oneshot(WANDA, scanned, STACKED, BATCHES)[0]
    with pytest.raises(ValueError, match="'head'"):
        sparsity.oneshot(GPT, lambda p, x: jnp.sqrt(scanned(p, x)) @ p["head"].T, broken, BATCHES,
                         out=out)  # fmt: skip
    done = (out / "journal.jsonl").read_text().splitlines()
    assert len(done) == 1 + NUM_LAYERS
    assert expected is not None


def test_a_dry_run_counts_two_blocks_and_no_model():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STACKED)
    needs = sparsity.oneshot(GPT, scanned, shapes, BATCHES, dry_run=True)
    assert [block.name for block in needs.blocks] == ["layers", "head"]
    block = needs.blocks[0]
    assert block.params == 2 * 16 * 32 * 4
    assert block.statistics == 2 * 32 * 32 * 4
    assert needs.model == sum(4 * x.size for x in jax.tree.leaves(STACKED))
    assert needs.resident == max(x.resident for x in needs.blocks)
    assert "layers" in str(needs)
