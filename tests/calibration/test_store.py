"""The folder of a run is written block by block, and continues after a kill at the last one."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from sparsity.calibration import open_checkpoint
from sparsity.calibration.store import RunFolder, copy_metadata, digest

try:
    import resource
except ImportError:  # Windows
    resource = None

PARAMS = {
    "layers/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "layers/scale": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    "step": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float32),
}
IDENTITY = {"params": "p", "batches": "b"}


def open_folder(path, identity=IDENTITY):
    return RunFolder(path / "run", identity, PARAMS, ["layers/kernel"])


def write_block(folder, layer, commit=True):
    folder.write(
        "model",
        "layers/kernel",
        (layer, slice(None), slice(None)),
        np.full((3, 4), 9.0, np.float32),
    )
    folder.write("masks", "layers/kernel", (layer,), np.ones((3, 4), np.uint8))
    if commit:
        folder.commit(f"layer {layer}", {"error": layer})


def assert_finished(path):
    """The files are those of other readers, too."""
    model, masks = (
        safetensors.numpy.load_file(path / "run" / f"{kind}.safetensors")
        for kind in ("model", "masks")
    )
    assert model.keys() == PARAMS.keys()
    assert (model["layers/kernel"] == 9).all()
    assert masks["layers/kernel"].all()
    for name in ("layers/scale", "step", "empty"):
        np.testing.assert_array_equal(model[name], np.asarray(PARAMS[name]), strict=True)


def test_blocks_are_written_in_place_and_the_results_are_read_lazily(tmp_path):
    folder = open_folder(tmp_path)
    assert not folder.done
    results = folder.open("model")
    for layer in (0, 1):
        write_block(folder, layer)
    assert (folder.read("layers/kernel", (1, 2)) == 9).all()
    folder.finish({"seconds": 3})
    assert folder.is_finished
    assert_finished(tmp_path)
    assert (results["layers/kernel"][0] == 9).all()  # opened before the file got its name
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == {"seconds": 3}
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "run")["step"], 7)
    again = open_folder(tmp_path)
    assert again.done == {"layer 0": {"error": 0}, "layer 1": {"error": 1}}
    with pytest.raises(OSError, match="it is finished"):
        write_block(again, 0)


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_kill_within_a_commit_does_the_block_again(tmp_path, cut):
    folder = open_folder(tmp_path)
    write_block(folder, 0)
    write_block(folder, 1)
    journal = tmp_path / "run" / "journal.jsonl"
    os.truncate(journal, journal.stat().st_size - 1 - cut)
    folder = open_folder(tmp_path)
    assert list(folder.done) == ["layer 0"]
    write_block(folder, 1)
    assert list(open_folder(tmp_path).done) == ["layer 0", "layer 1"]
    open_folder(tmp_path).finish()
    assert_finished(tmp_path)


def test_a_kill_before_the_first_block_starts_afresh(tmp_path):
    write_block(open_folder(tmp_path), 0)
    os.truncate(tmp_path / "run" / "journal.jsonl", 3)
    folder = open_folder(tmp_path)
    assert not folder.done
    np.testing.assert_array_equal(folder.read("layers/kernel", ()), PARAMS["layers/kernel"])


def test_a_kill_between_the_names_of_the_files_is_made_up_for(tmp_path):
    folder = open_folder(tmp_path)
    for layer in (0, 1):
        write_block(folder, layer)
    run = tmp_path / "run"
    (run / "masks.safetensors.part").rename(run / "masks.safetensors")
    open_folder(tmp_path).finish()
    assert_finished(tmp_path)


def test_a_cut_file_and_a_damaged_journal_are_named(tmp_path):
    write_block(open_folder(tmp_path), 0)
    part, journal = (tmp_path / "run" / x for x in ("model.safetensors.part", "journal.jsonl"))
    data = journal.read_bytes()
    journal.write_bytes(data.replace(b"{", b"", 1))
    with pytest.raises(ValueError, match=r"journal\.jsonl cannot be read: .* delete the folder"):
        open_folder(tmp_path)
    journal.write_bytes(data)
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model\.safetensors\.part cannot be read: it has"):
        open_folder(tmp_path)


def test_another_run_is_refused_with_what_differs(tmp_path):
    open_folder(tmp_path)
    with pytest.raises(ValueError, match="holds another run: its 'batches' differ"):
        open_folder(tmp_path, IDENTITY | {"batches": "c"})


def test_foreign_folders_and_files_are_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match="is a file"):
        open_folder(tmp_path)
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("of a user")
    with pytest.raises(ValueError, match="holds other files"):
        open_folder(tmp_path)
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_values_of_another_shape_or_dtype_are_refused(tmp_path):
    folder = open_folder(tmp_path)
    with pytest.raises(ValueError, match="values must be 3x4 float32, got 4x3 float32"):
        folder.write("model", "layers/kernel", (0,), np.ones((4, 3), np.float32))
    with pytest.raises(ValueError, match="values must be 3 bfloat16, got 3 float32"):
        folder.write("model", "layers/scale", (0,), np.ones(3, np.float32))


def test_a_layer_along_another_axis_is_written(tmp_path):
    folder = open_folder(tmp_path)
    folder.write(
        "model", "layers/kernel", (slice(None), slice(None), 1), np.zeros((2, 3), np.float32)
    )
    expected = PARAMS["layers/kernel"].copy()
    expected[:, :, 1] = 0
    np.testing.assert_array_equal(folder.read("layers/kernel", ()), expected)


def test_a_name_that_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="z: safetensors holds no complex128"):
        RunFolder(tmp_path / "run", {}, {"z": np.ones(2, complex)}, [])


OTHER = """
import sys
import numpy as np
from sparsity.calibration.store import RunFolder
try:
    RunFolder(sys.argv[1], {}, {"w": np.ones(2)}, [])
except ValueError as error:
    print(error)
"""


def test_two_processes_do_not_write_one_folder(tmp_path):
    folder = RunFolder(tmp_path / "run", {}, {"w": np.ones(2)}, [])
    command = [sys.executable, "-c", OTHER, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "is used by another process" in done.stdout
    folder.finish()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_a_second_call_in_a_process_takes_the_folder_over(tmp_path):
    first, second = open_folder(tmp_path), open_folder(tmp_path)
    with pytest.raises(OSError, match="a later call of this process has opened it"):
        write_block(first, 0)
    write_block(second, 0)


@pytest.mark.skipif(resource is None, reason="a limit of POSIX")
def test_a_full_disk_keeps_finished_blocks(tmp_path):
    folder = open_folder(tmp_path)
    write_block(folder, 0)
    size, limits = (
        (tmp_path / "run" / "journal.jsonl").stat().st_size,
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large\. The 1 finished blocks are kept"):
            folder.commit("layer 1", {"error": "text " * 9})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write_block(folder, 1)
    assert open_folder(tmp_path).done == {"layer 0": {"error": 0}, "layer 1": {"error": 1}}


def test_a_run_larger_than_the_disk_is_refused_at_once(tmp_path):
    params = {"w": jax.ShapeDtypeStruct((1 << 30, 1 << 20), np.float32)}
    with pytest.raises(OSError, match="the run needs 4,503,599,627,370,"):
        RunFolder(tmp_path / "run", {}, params, [])


def test_the_small_files_of_a_source_are_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    names = ["config.json", "tokenizer.model", "model.safetensors.index.json", "a.bin", "x.py"]
    for name in names:
        (source / name).write_text(name)
    copy_metadata(str(source), target)
    assert sorted(x.name for x in target.iterdir()) == names[:2]
    copy_metadata({"w": 1}, target)


# Digests.

COUNTING = {"a": np.arange(4.0), "key": jax.random.key(1)}
DIFFERENT = [
    ({"a": np.arange(4.0)}, {"a": np.arange(4.0) + 1}),
    ({"a": np.arange(4.0)}, {"b": np.arange(4.0)}),
    (np.zeros(4), np.zeros((2, 2))),
    (np.zeros(4, np.float32), np.zeros(4, np.int32)),
    (jax.random.key(1), jax.random.key(2)),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (optax.adam(0.1), optax.adam(0.2)),
    (["a", "b"], ["ab", ""]),
    (np.dtype("float32"), np.dtype("float64")),
    (None, 0),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_digests_tell_values_apart(one, other):
    assert digest(one) != digest(other)


def test_digests_are_equal_in_every_process():
    values = "{'a', 'b'}, optax.adamw(0.1), np.arange(4), sparsity.Uniform(0.5)"
    imports = "import numpy as np, optax, sparsity; from sparsity.calibration.store import digest"
    program = f"{imports}; print(digest(({values})))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }
    assert len(told) == 1


def test_an_array_on_disk_counts_by_its_file(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    first = digest(open_checkpoint(path))
    assert digest(open_checkpoint(path)) == first
    os.utime(path, (1, 1))
    assert digest(open_checkpoint(path)) != first


def test_a_function_that_holds_itself_has_a_digest():
    def call():
        return call

    assert digest(call) == digest(call)
