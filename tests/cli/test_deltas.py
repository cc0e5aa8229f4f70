"""`sparsity apply`, and `sparsity diff` of deltas: every format, exact bits, one line an error."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from sparsity import Delta
from sparsity.cli import checkpoints, main
from tests.cli.checkpoints import FORMATS, weights
from tests.helpers import bits


def arrays(path):
    """Returns the arrays of a checkpoint by name."""
    return {name: np.asarray(x) for name, x in checkpoints.read_by_name(path).items()}


def tuned_weights():
    """Returns the weights with a few other entries in most leaves."""
    tuned = {name: array.copy() for name, array in weights().items()}
    for name in ("kernel", "bf16", "double", "count"):
        tuned[name].flat[3:6] = tuned[name].flat[0:3]
    tuned["kernel"][0, 0] = -0.0
    return tuned


def error(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("sparsity: error: ")
    assert message.count("\n") == 1
    return message


@pytest.fixture
def files(tmp_path):
    """A base, its delta of two leaves, and the tuned weights."""
    base = {"a/kernel": np.ones((4, 8), np.float32), "a/bias": np.zeros(8, np.float32)}
    tuned = base | {"a/kernel": base["a/kernel"].copy()}
    tuned["a/kernel"][1, :2] = [1.5, -2]
    safetensors.numpy.save_file(base, tmp_path / "base.safetensors")
    safetensors.numpy.save_file(tuned, tmp_path / "tuned.safetensors")
    Delta.between(base, tuned).save(tmp_path / "delta.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "delta.safetensors", tuned


@pytest.mark.parametrize("name", FORMATS)
def test_a_delta_of_two_checkpoints_makes_one_from_the_other(tmp_path, capsys, name):
    save, load = FORMATS[name]
    for folder, tree in (("old", weights()), ("new", tuned_weights())):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / name, tree)
    old, new, out = (tmp_path / folder / name for folder in ("old", "new", "."))
    assert main(["diff", str(old), str(new), "--save", str(tmp_path / "delta")]) == 1
    assert main(["apply", str(old), str(tmp_path / "delta"), str(out)]) == 0
    assert "parameters changed." in capsys.readouterr().out
    assert main(["diff", str(out), str(new)]) == 0
    assert bits(arrays(out)) == bits(arrays(new))
    assert bits(arrays(old)) != bits(arrays(new))
    assert jax.tree.structure(load(out)) == jax.tree.structure(load(new))


def test_a_delta_of_a_nested_model_fits_its_flat_checkpoint(files):
    base, delta, tuned = files
    nested = {"a": {"kernel": np.ones((4, 8), np.float32), "bias": np.zeros(8, np.float32)}}
    applied = Delta.load(delta).apply(nested)
    assert bits(applied["a"]["kernel"]) == bits(tuned["a/kernel"])
    params = nested | {"a": nested["a"] | {"kernel": tuned["a/kernel"]}}
    Delta.between(nested, params).save(delta)
    out = base.parent / "out.safetensors"
    assert main(["apply", *map(str, (base, delta, out))]) == 0
    assert bits(arrays(out)) == bits(tuned)


def test_the_byte_order_of_a_checkpoint_stays(tmp_path):
    base, tuned = ({"w": np.array(values, ">f4")} for values in ([1, 2, 3], [1, 4, 3]))
    np.savez(tmp_path / "a.npz", **base)
    delta = Delta.between(base, tuned)
    assert bits(delta.apply(base)) == bits(tuned)
    delta.save(tmp_path / "d")
    out = tmp_path / "out.npz"
    assert main(["apply", *map(str, (tmp_path / "a.npz", tmp_path / "d", out))]) == 0
    assert bits(arrays(out)) == bits(tuned)


def test_a_merged_delta_is_applied(files):
    base, path, _ = files
    delta = Delta.load(path)
    Delta.merge([delta, delta], [0.25, 0.25]).save(path)
    out = base.parent / "out.safetensors"
    assert main(["apply", *map(str, (base, path, out))]) == 0
    np.testing.assert_array_equal(arrays(out)["a/kernel"][1, :2], [1.25, -0.5])


def test_a_filter_applies_and_checks_its_leaves_alone(files):
    base, delta, _ = files
    out = base.parent / "out.safetensors"
    assert main(["apply", *map(str, (base, delta, out)), "--filter", ".*bias"]) == 0
    assert bits(arrays(out)) == bits(arrays(base))


def test_diff_shows_a_delta(files, capsys):
    _, path, _ = files
    assert main(["diff", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    row = ["a/kernel", "4x8", "float32", "1", "2", "6.2500%", "16", "B"]
    assert row in [line.split() for line in lines]
    assert lines[-1] == "Delta(2 entries in 1 of 2 parameters, 16 bytes)"
    delta = Delta.load(path)
    Delta.merge([delta, delta], [0.5, -2]).save(path)
    assert main(["diff", str(path)]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[3] for row in rows if row[:1] == ["a/kernel"]] == ["0.5", "-2"]


def test_an_empty_delta_is_no_difference(files, capsys):
    base, path, _ = files
    assert main(["diff", str(base), str(base), "--save", str(path.with_name("none"))]) == 0
    assert main(["diff", str(path.with_name("none"))]) == 0
    assert "Delta(0 entries in 0 of 2 parameters" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float8_e5m2"])
def test_a_difference_of_bits_is_a_difference_that_a_delta_holds(tmp_path, capsys, dtype):
    base = np.zeros(4, dtype)
    base[2:] = np.nan
    for position in (1, 3):  # the sign of a zero, a bit of a NaN
        tuned = base.copy()
        tuned.view(np.uint8).reshape(4, -1)[position, -1] ^= 0x80
        for name, array in (("old", base), ("new", tuned)):
            safetensors.numpy.save_file({"w": array.view(dtype)}, tmp_path / f"{name}.safetensors")
        old, new, out = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "out"))
        delta = tmp_path / f"delta{position}"
        assert main(["diff", *map(str, (old, new)), "--json", "--save", str(delta)]) == 1
        assert json.loads(capsys.readouterr().out)["total"]["bits"] == 1
        assert main(["diff", *map(str, (old, old))]) == 0
        assert main(["diff", str(delta)]) == 1
        assert main(["apply", *map(str, (old, delta, out)), "--overwrite"]) == 0
        assert main(["diff", *map(str, (out, new))]) == 0
        assert bits(arrays(out)) == bits({"w": tuned})
        assert "made from: 'w' is" in error(capsys, "apply", new, delta, out, "--overwrite")


def test_saving_a_delta_says_how_large_it_and_the_checkpoint_are(tmp_path, capsys):
    dense = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float16)
    for name, array in (("old", dense), ("new", np.where(np.arange(64) < 6, dense, 0))):
        safetensors.numpy.save_file({"w": array}, tmp_path / f"{name}.safetensors")
    delta, files = tmp_path / "delta", [f"{tmp_path}/{name}.safetensors" for name in ("old", "new")]
    assert main(["diff", *files, "--save", str(delta)]) == 1
    message = capsys.readouterr().err
    assert message == "sparsity: delta of 22.57 kB, checkpoint of 8.26 kB\n"


def test_another_base_is_refused_by_name_and_nothing_is_written(files, capsys):
    base, delta, tuned = files
    out = base.with_name("out.safetensors")
    safetensors.numpy.save_file(tuned, base)
    message = error(capsys, "apply", base, delta, out)
    assert "'a/kernel' is BaseParameter" in message
    safetensors.numpy.save_file({"a/kernel": tuned["a/kernel"]}, base)
    assert "'a/bias' is missing" in error(capsys, "apply", base, delta, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["apply", "base", "base", "out"], "base.safetensors cannot be read: its metadata do not"),
        (["apply", "base", "nothing", "out"], "No such file or directory: "),
        (["apply", "base", "delta", "tuned"], "exists. Give another path, or --overwrite"),
        (["apply", "base", "delta", "out", "--filter", "kernle"], "nearest: ['a/kernel']"),
        (["diff", "base"], "it holds no delta. If it is damaged, save it again."),
        (["diff", "delta", "--save", "out"], "--save and --json need two checkpoints"),
        (["diff", "base", "tuned", "--save", "delta"], "exists. Give another path to --save"),
    ],
)
def test_bad_arguments_are_one_line_and_write_nothing(files, capsys, arguments, message):
    folder = files[0].parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = ("base", "delta", "tuned", "out", "nothing")
    paths = {name: folder / f"{name}.safetensors" for name in names}
    assert message in error(capsys, *(paths.get(word, word) for word in arguments))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
