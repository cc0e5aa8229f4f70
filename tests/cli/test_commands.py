"""`sparsity inspect`, `prune` and `diff` on checkpoints of every format."""

import json
import subprocess
import sys
import tracemalloc
from importlib import metadata

import flax.serialization
import jax
import numpy as np
import pytest
import safetensors.numpy

import sparsity
from sparsity.cli import checkpoints, inspect, main
from tests import helpers
from tests.cli.checkpoints import FORMATS, save_orbax, weights

HALF = ["--sparsity", "0.5"]
# Flax refuses maps with keys that are numbers before 0.12.8.
READS_NUMBERED_MAPS = tuple(map(int, metadata.version("flax").split(".")[:3])) >= (0, 12, 8)


@pytest.fixture(params=FORMATS)
def saved(request, tmp_path):
    """A checkpoint of each format, and the function that reads it."""
    save, load = FORMATS[request.param]
    path = tmp_path / request.param
    save(path, weights())
    return path, load


@pytest.fixture
def kernels(tmp_path):
    """A file with two kernels."""
    path = tmp_path / "kernels.safetensors"
    rng = np.random.default_rng(1)
    make = lambda scale: (scale * rng.normal(size=(8, 8))).astype(np.float32)  # noqa: E731
    safetensors.numpy.save_file({"big": make(10.0), "small": make(1.0)}, path)
    return path


def test_a_checkpoint_without_weights_is_refused(tmp_path, capsys):
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, a=np.arange(6), b=np.ones(2, bool))
    assert main(["prune", str(source), str(target), *HALF]) == 2
    assert "nothing to remove from the floating or complex" in capsys.readouterr().err
    assert not target.exists()


def report(capsys, *arguments):
    """The JSON that a command prints."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def named(tree):
    return {
        "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value
        for path, value in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(value, np.ndarray | np.generic)
    }


def assert_same(a, b):
    """The same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert getattr(x, "dtype", type(x)) == getattr(y, "dtype", type(y))
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Inspect.


def test_inspect_reports_every_array_of_every_format(saved, capsys):
    path, load = saved
    code, actual = report(capsys, "inspect", path)
    assert code == 0
    arrays = named(load(path))
    assert actual["leaves"].keys() == arrays.keys()
    for name, array in arrays.items():
        told = actual["leaves"][name]
        assert (told["shape"], told["dtype"]) == (list(array.shape), str(array.dtype))
        assert (told["size"], told["nonzeros"]) == (array.size, np.count_nonzero(array))
        assert told["bytes"]["dense"] == array.nbytes
    assert actual["total"]["bytes"]["dense"] == sum(array.nbytes for array in arrays.values())


def test_inspect_finds_patterns_and_counts_bytes(tmp_path, capsys):
    mask = np.tile(np.array([[1, 0, 0, 1], [0, 1, 1, 0]], bool), (4, 4))
    mask[0] = np.tile([1, 1, 0, 0], 4)
    values = np.where(mask, 1.5, 0).astype(np.float32)
    np.savez(tmp_path / "a.npz", w=values)
    told = report(capsys, "inspect", tmp_path / "a.npz")[1]["leaves"]["w"]
    assert told["patterns"] == ["nm_2,4,-1"]
    assert told["sparsity"] == 0.5
    assert told["bytes"]["dense"] == 8 * 16 * 4
    assert told["bytes"]["bitmask"] == 8 * 16 // 8 + 8 * 16 // 2 * 4
    assert 0 < told["bytes"]["zstd"] < told["bytes"]["bitmask"]


def test_inspect_tells_the_sparsity_of_arrays_of_at_most_one_entry(tmp_path, capsys):
    arrays = {"zero": np.zeros(1), "one": np.ones(()), "empty": np.zeros((0, 2))}
    np.savez(tmp_path / "a.npz", **arrays)
    told = report(capsys, "inspect", tmp_path / "a.npz")[1]["leaves"]
    assert {name: told[name]["sparsity"] for name in told} == {"zero": 1, "one": 0, "empty": 0}


def test_values_of_msgpack_that_are_no_arrays_are_kept(tmp_path, capsys):
    others = {
        "text": "t",
        "bytes": b"b",
        "list": [1, 2.5, None, True],
        "complex": 3j,
        "numbers": {5: -7} if READS_NUMBERED_MAPS else {},
        "scalar": np.float32(2),
    }
    tree = {"net": others, "w": np.array([[1.0, 2.0], [3.0, 4.0]])}
    path, target = tmp_path / "a.msgpack", tmp_path / "b.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    assert list(report(capsys, "inspect", path)[1]["leaves"]) == ["net/scalar", "w"]
    assert main(["prune", str(path), str(target), *HALF, "--filter", "w|net/scalar"]) == 0
    made = flax.serialization.msgpack_restore(target.read_bytes())
    assert_same(made, tree | {"w": np.array([[0.0, 0.0], [3.0, 4.0]])})


def test_the_compressed_size_is_that_of_zstd(kernels, capsys):
    zstandard = pytest.importorskip("zstandard")
    told = report(capsys, "inspect", kernels)[1]["leaves"]["big"]
    values = safetensors.numpy.load_file(kernels)["big"]
    stream = zstandard.ZstdCompressor().compressobj()
    expected = len(stream.compress(values.tobytes()) + stream.flush())
    assert told["bytes"]["zstd"] == expected


def test_a_filter_chooses_leaves_by_path_or_regular_expression(saved, capsys):
    path, load = saved
    everything = named(load(path))
    prefix = "net/" if "net/kernel" in everything else ""
    code, actual = report(capsys, "inspect", path, "--filter", f"{prefix}kernel")
    assert (code, list(actual["leaves"])) == (0, [f"{prefix}kernel"])
    actual = report(capsys, "inspect", path, "--filter", f"{prefix}(kernel|bias)")[1]
    assert set(actual["leaves"]) == {f"{prefix}kernel", f"{prefix}bias"}


def test_the_table_shows_leaves_as_they_are_called(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **{"[red]:smile:": np.eye(4, dtype=np.float32)})
    assert main(["inspect", str(tmp_path / "a.npz")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "smile" in line)
    cells = ["[red]:smile:", "4x4", "float32", "nm_1,4,-2", "nm_1,4,-1", "0.7500"]
    assert row.split()[: len(cells)] == cells


def test_the_table_shows_what_a_terminal_would_obey(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **{"up\n\x1b[31m": np.ones(2), "größe": np.ones(2)})
    assert main(["inspect", str(tmp_path / "a.npz")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = [row[0] for row in rows if row and "─" not in row[0]]
    assert names == ["parameter", "größe", r"up\n\x1b[31m", "total"]


PACKAGES = ["flax", "msgpack", "orbax", "safetensors", "tensorstore", "zstandard"]


def test_npz_needs_no_other_package_and_says_once_what_is_left_out(tmp_path, capsys, monkeypatch):
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    path, pruned = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(path, w=np.arange(1.0, 5).reshape(2, 2), v=np.ones(3))
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["w", "2x2", "float64", "0.0000", "32", "B", "33", "B", "-"] in rows
    assert ["total", "7", "0.0000", "56", "B", "58", "B", "-"] in rows
    assert printed.err.count("zstd") == printed.err.count("\n") == 1
    assert "pip install 'jax-sparsity[cli]'" in printed.err
    told = report(capsys, "inspect", path)[1]
    assert told["leaves"]["w"]["bytes"] == {"dense": 32, "bitmask": 33, "zstd": None}
    assert told["total"]["bytes"]["zstd"] is None
    assert main(["prune", str(path), str(pruned), *HALF]) == 0
    assert main(["diff", str(path), str(pruned)]) == 1


@pytest.mark.parametrize("name", ["a.msgpack", "a_folder"])
def test_a_format_without_its_package_says_what_to_install(tmp_path, capsys, monkeypatch, name):
    FORMATS[name][0](tmp_path / name, weights())
    for module in {*PACKAGES, "flax.serialization", "orbax.checkpoint"}:
        monkeypatch.setitem(sys.modules, module, None)
    capsys.readouterr()
    assert "pip install 'jax-sparsity[cli]'" in error(capsys, "inspect", tmp_path / name)


def test_entries_in_the_order_of_fortran_are_read(tmp_path, capsys):
    mask = np.array(sparsity.NByM(2, 4, -2).select(helpers.normal(16, 12), 0.5))
    np.savez(tmp_path / "a.npz", w=np.asfortranarray(mask.astype(np.float32)))
    told = report(capsys, "inspect", tmp_path / "a.npz")[1]["leaves"]["w"]
    assert told["patterns"] == ["nm_2,4,-2"]


@pytest.mark.slow
def test_an_array_that_flax_splits_is_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    tree = {"w": helpers.normal(9, 9), "x": {"y": helpers.normal(3)}}
    path = tmp_path / "a.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    told = report(capsys, "inspect", path)[1]["leaves"]
    assert told["w"]["shape"] == [9, 9]
    assert told["w"]["nonzeros"] == np.count_nonzero(tree["w"])
    assert main(["prune", str(path), str(tmp_path / "b.msgpack"), *HALF]) == 0
    updater = sparsity.create_updater_from_config({"algorithm": "magnitude", "sparsity": 0.5})
    made = flax.serialization.msgpack_restore((tmp_path / "b.msgpack").read_bytes())
    assert_same(made, jax.tree.map(np.asarray, updater.instant_sparsify(tree)[0]))


# Arrays' bytes that `inspect` takes: an array and its mask; flax has a file, too, and copies it.
MEMORY = {"a.safetensors": 1.6, "a.npz": 1.6, "fortran.npz": 2.8, "a.msgpack": 3.2}


@pytest.mark.parametrize("name", MEMORY)
def test_inspecting_takes_little_memory_beside_an_array(tmp_path, capsys, name):
    array = np.zeros((4096, 4096), np.float32)
    array[:, ::2] = 1
    stored = np.asfortranarray(array) if name.startswith("fortran") else array
    FORMATS[name.replace("fortran", "a")][0](tmp_path / name, {"w": stored})
    tracemalloc.start()
    actual = report(capsys, "inspect", tmp_path / name, "--filter", ".*w")[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (told,) = actual["leaves"].values()
    assert told["patterns"] == ["channel_-1"]
    assert peak < MEMORY[name] * array.nbytes


INSPECT = """
import resource, sys
import tensorstore, zstandard
from sparsity.cli.main import main

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
assert main(["inspect", sys.argv[1], "--json"]) == 0
print(peak() - before, file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_inspecting_a_folder_takes_the_memory_of_two_arrays(tmp_path):
    rng = np.random.default_rng(0)
    tree = {name: rng.standard_normal((8192, 2048), np.float32) for name in "vwx"}
    save_orbax(tmp_path / "a", tree)
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, str(tmp_path / "a")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leaves"]["w"]["nonzeros"] == np.count_nonzero(tree["w"])
    kibibytes = int(done.stderr.splitlines()[-1])
    assert kibibytes * 1024 < 2.2 * tree["w"].nbytes


# Prune.


def assert_prunes_as_the_api(path, load, **options):
    """Prunes a checkpoint, and what the format's own package reads, by the API."""
    target = path.with_stem("pruned")
    command_line = [f"--{key}={value}" for key, value in options.items()]
    assert main(["prune", str(path), str(target), *HALF, *command_line]) == 0
    if "type" in options:
        options["sparsity_type"] = options.pop("type")
    updater = sparsity.create_updater_from_config(
        {"algorithm": "magnitude", "sparsity": 0.5} | options
    )
    before = load(path)
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else None, before)
        pruned = updater.instant_sparsify(arrays)[0]
    expected = jax.tree.map(
        lambda new, old: old if new is None else np.asarray(new),
        pruned,
        before,
        is_leaf=lambda leaf: leaf is None,
    )
    assert_same(load(target), expected)


@pytest.mark.slow
def test_every_format_is_pruned_as_by_the_api(saved):
    assert_prunes_as_the_api(*saved, type="nm_2,4,-2")


CHOICES = [
    {},
    {"scope": "global"},
    {"algorithm": "global_magnitude"},
    {"algorithm": "random"},
    {"type": "block_2,4"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_every_choice_prunes_as_the_api(kernels, options):
    assert_prunes_as_the_api(kernels, safetensors.numpy.load_file, **options)


def test_what_is_not_pruned_keeps_its_bytes(kernels, tmp_path):
    target = tmp_path / "b.safetensors"
    assert main(["prune", str(kernels), str(target), *HALF, "--filter", "small"]) == 0
    before, after = (safetensors.numpy.load_file(path) for path in (kernels, target))
    assert before["big"].tobytes() == after["big"].tobytes()
    assert np.count_nonzero(after["small"]) == 32
    length = int.from_bytes(kernels.read_bytes()[:8], "little")
    assert kernels.read_bytes()[: 8 + length] == target.read_bytes()[: 8 + length]


@pytest.mark.slow
def test_pruning_prints_what_it_reached(kernels, tmp_path, capsys):
    target = tmp_path / "b.safetensors"
    assert main(["prune", str(kernels), str(target), *HALF, "--scope", "global"]) == 0
    assert capsys.readouterr().out == "2 of 2 parameters pruned to 0.5000.\n"


@pytest.mark.slow
def test_an_existing_file_is_replaced_only_when_asked(saved, capsys):
    path, load = saved
    before = load(path)
    again = ["prune", str(path), str(path), *HALF]
    assert main(again) == 2
    assert capsys.readouterr().err.endswith(
        f"{path} exists. Give another path, or --overwrite to replace it.\n"
    )
    assert_same(load(path), before)
    if path.is_dir():
        assert main([*again, "--overwrite"]) == 2
        return
    assert main([*again, "--overwrite"]) == 0
    kernel = next(value for name, value in named(load(path)).items() if name.endswith("kernel"))
    assert np.count_nonzero(kernel) == 256


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_while_writing_leaves_nothing_and_no_change(
    kernels, tmp_path, capsys, monkeypatch, exists
):
    def fail(source, target, arrays):
        target.write_bytes(b"half of it")
        raise OSError("No space left on device")

    name = ".safetensors"
    monkeypatch.setitem(checkpoints.FORMATS, name, fail)
    target = tmp_path / "b.safetensors"
    if exists:
        target.write_bytes(kernels.read_bytes())
    files = sorted(tmp_path.iterdir())
    assert main(["prune", str(kernels), str(target), *HALF, "--overwrite"]) == 2
    assert capsys.readouterr().err == (
        f"sparsity: error: {target} cannot be written: No space left on device. Nothing there has "
        "changed.\n"
    )
    assert sorted(tmp_path.iterdir()) == files
    assert not exists or target.read_bytes() == kernels.read_bytes()


# Diff.


def test_equal_checkpoints_do_not_differ(saved, capsys):
    path, _ = saved
    code, actual = report(capsys, "diff", path, path)
    assert code == 0
    assert actual["total"]["dropped"] == actual["total"]["grown"] == actual["total"]["changed"] == 0


def test_diff_counts_what_moved_and_what_changed(tmp_path, capsys):
    nan = np.nan
    old = {"w": np.array([1, 2, 0, 0, nan, 5, nan, 7]), "same": np.ones(3), "gone": np.ones(2)}
    new = {"w": np.array([1, 3, 4, -0.0, nan, 0, 6, nan]), "same": np.ones(3), "new": np.ones(2)}
    np.savez(tmp_path / "old.npz", **old)
    safetensors.numpy.save_file(new, tmp_path / "new.safetensors")
    arguments = ["diff", tmp_path / "old.npz", tmp_path / "new.safetensors"]
    code, actual = report(capsys, *arguments)
    assert code == 1
    counts = {"kept": 5, "dropped": 1, "grown": 1, "changed": 3, "bits": 1}
    assert {key: actual["leaves"]["w"][key] for key in counts} == counts
    assert actual["leaves"]["gone"]["new"] is None
    assert actual["leaves"]["new"]["old"] is None
    assert report(capsys, *arguments, "--filter", "same")[0] == 0
    main([*map(str, arguments)])
    out = capsys.readouterr().out
    assert "2 float64 -> nothing" in out
    assert "3 of 4 parameters differ" in out
    assert "same" not in out


@pytest.mark.parametrize("new", [np.ones((3, 2)), np.ones((2, 3), np.float32)])
def test_another_shape_or_dtype_is_a_difference(tmp_path, capsys, new):
    np.savez(tmp_path / "old.npz", w=np.ones((2, 3)))
    np.savez(tmp_path / "new.npz", w=new)
    assert report(capsys, "diff", tmp_path / "old.npz", tmp_path / "new.npz")[0] == 1


# Help, and bad input.


def error(capsys, *arguments):
    """The one line that a command prints when it ends with the code 2."""
    assert main([*map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("sparsity: error: ").rstrip("\n")


@pytest.mark.parametrize("command", [[], ["inspect"], ["prune"], ["diff"], ["apply"]])
def test_help_shows_examples_and_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"  sparsity {command[0] if command else 'inspect'}" in text
    assert "exit codes: 0 = done" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["prone"], "invalid choice: 'prone'"),
        (["inspect", "nothing.npz"], "nothing.npz does not exist. Give the path"),
        (
            ["inspect", "{kernels}", "--filter", "smal"],
            "no parameter; nearest: ['small']",
        ),
        (["inspect", "{kernels}", "--filter", "["], "no regular expression: unterminated charac"),
        (["diff", "{kernels}", "nothing.npz"], "nothing.npz does not exist"),
        (["diff", "nothing"], "No such file or directory: nothing"),
        (
            ["apply", "{kernels}", "nothing", "b.safetensors"],
            "No such file or directory: nothing",
        ),
        (["prune", "{kernels}", "b.safetensors"], "required: --sparsity. See 'sparsity prune --he"),
    ],
)
def test_bad_arguments_are_one_line_that_says_the_remedy(kernels, capsys, arguments, message):
    command_line = [argument.format(kernels=kernels) for argument in arguments]
    assert message in error(capsys, *command_line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sparsity", "50"], r"must be in [0, 1] (0.8 means 80 %)"),
        (["--sparsity", "half"], "invalid float value: 'half'"),
        ([*HALF, "--type", "nm_2,3"], "which are 'big', 'small'"),
        ([*HALF, "--type", "2 of 4"], "Sparsity type '2 of 4' is not known"),
        ([*HALF, "--algorithm", "magnitud"], "Did you mean 'magnitude'?"),
        ([*HALF, "--scope", "all"], "Known: layerwise, global"),
        (
            [*HALF, "--scope", "global", "--type", "nm_2,4"],
            "Use scope=Layerwise().",
        ),
        ([*HALF, "--filter", "smal"], "nearest: ['small']"),
    ],
)
def test_bad_choices_of_pruning_write_nothing(kernels, tmp_path, capsys, options, message):
    target = tmp_path / "b.safetensors"
    assert message in error(capsys, "prune", kernels, target, *options)
    assert list(tmp_path.iterdir()) == [kernels]


@pytest.mark.parametrize("name", sparsity.all_algorithm_names())
def test_an_algorithm_prunes_a_checkpoint_or_is_refused(name, kernels, tmp_path, capsys):
    target = tmp_path / "b.safetensors"
    updater = sparsity.create_updater_from_config({"algorithm": name, "sparsity": 0.5})
    try:
        mask = updater.instant_sparsify({"w": np.ones((4, 4), np.float32)})[1]["w"]
    except (RuntimeError, ValueError):
        mask = None
    prune = ["prune", kernels, target, *HALF, "--algorithm", name]
    if mask is None:
        assert error(capsys, *prune)
        assert not target.exists()
    else:
        assert main([*map(str, prune)]) == 0
        assert np.count_nonzero(safetensors.numpy.load_file(target)["big"]) < 64


def test_the_help_names_the_formats_that_an_error_names(tmp_path, capsys):
    (tmp_path / "a.txt").touch()
    formats = error(capsys, "inspect", tmp_path / "a.txt").partition("Known are ")[2]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"formats: {formats.removesuffix('.')}\n" in capsys.readouterr().out


def test_leaves_that_do_not_fit_a_type_stay_dense_and_are_named(tmp_path, capsys):
    rng = np.random.default_rng(0)
    tree = {"stem": rng.normal(size=(2, 6)), "narrow": rng.normal(size=(2, 8)), "bias": np.ones(6)}
    np.savez(tmp_path / "a.npz", **tree)
    files = tmp_path / "a.npz", tmp_path / "b.npz"
    assert main(["prune", *map(str, files), *HALF, "--type", "nm_2,4"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "left dense" in line
    assert "'stem' of shape (2, 6) has 6 entries, which m = 4 does not divide" in line
    pruned = np.load(tmp_path / "b.npz")
    assert_same(pruned["stem"], tree["stem"])
    assert (np.count_nonzero(pruned["narrow"].reshape(-1, 4), axis=1) == 2).all()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("b.npz", "the ending '.safetensors'"),
        ("no_folder/b.safetensors", "cannot be written: No such file or directory"),
    ],
)
def test_a_bad_target_is_refused(kernels, tmp_path, capsys, target, message):
    assert message in error(capsys, "prune", kernels, tmp_path / target, *HALF)
    assert list(tmp_path.iterdir()) == [kernels]


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own(kernels):
    program = "import sys; from sparsity.cli import main; sys.exit(main())"
    run = [sys.executable, "-W", "error", "-c", program, "inspect", str(kernels), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=helpers.ROOT, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["total"]["size"] == 128


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999 B"),
        (1000, "1.00 kB"),
        (123_456, "123.46 kB"),
        (999_999, "1000.00 kB"),
        (10**6, "1.00 MB"),
        (10**9, "1.00 GB"),
        (10**12, "1.00 TB"),
        (10**15, "1000.00 TB"),
    ],
)
def test_bytes_are_written_with_the_largest_unit_that_leaves_a_digit(count, text):
    assert inspect.format_bytes(count) == text
