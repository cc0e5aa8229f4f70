"""Folders of Orbax: all layouts, copies that keep what they do not change, hostile descriptions."""

import json
import multiprocessing
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sparsity.cli import main
from tests.cli.checkpoints import ORBAX_LAYOUTS, save_orbax_layout

HALF = ["--sparsity", "0.5"]


# Starts processes as copies of one that has imported this module.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def inspect(path, log):
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(main(["inspect", str(path)]))


def inspect_alone(path):
    """Runs the command in a process, which a library may end; returns code and stderr."""
    log = path.with_suffix(".log")
    process = PROCESSES.Process(target=inspect, args=(path, log))
    process.start()
    process.join()
    return process.exitcode, log.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("database", "zarr3"), ORBAX_LAYOUTS)
def test_a_copy_keeps_the_types_of_values_and_what_is_not_pruned(tmp_path, database, zarr3):
    kernel = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    tree = {
        "a b": {"w": jnp.asarray(kernel), "v": kernel.astype(np.float64)},
        "list": [np.ones(2, np.int64)] * 11,
        "key": jax.random.key(3),
        "number": 2.5,
        "count": 7,
        "text": "t",
        "nothing": None,
    }
    source, target = tmp_path / "in put%20#", tmp_path / "out put%41"
    save_orbax_layout(source, tree, database=database, zarr3=zarr3, metadata={"by": "test"})
    (source / "notes.txt").write_text("not of the checkpoint")
    assert main(["prune", str(source), str(target), *HALF, "--filter", "a b/.*"]) == 0
    checkpointer = ocp.PyTreeCheckpointer()
    made = checkpointer.restore(target)
    mask = np.arange(12).reshape(3, 4) >= 6
    for name in ("w", "v"):
        np.testing.assert_array_equal(made["a b"].pop(name), kernel * mask)
        del tree["a b"][name]
    assert isinstance(checkpointer.restore(target)["a b"]["w"], jax.Array)
    assert jnp.issubdtype(made["key"].dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(
        jax.random.key_data(made.pop("key")), jax.random.key_data(tree.pop("key"))
    )
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    for new, old in zip(jax.tree.leaves(made), jax.tree.leaves(tree), strict=True):
        assert type(new) is type(old)
        np.testing.assert_array_equal(new, old)
    metadata = checkpointer.metadata(target).item_metadata
    assert metadata.custom_metadata == {"by": "test"}
    assert metadata.use_zarr3 == zarr3
    assert (target / "manifest.ocdbt").exists() == database
    assert not (target / "notes.txt").exists()


@pytest.mark.slow
def test_a_damaged_folder_is_one_line(tmp_path):
    tree = {str(i): np.random.default_rng(i).normal(size=(8, 8)) for i in range(50)}
    save_orbax_layout(tmp_path / "a", tree)
    for file in (tmp_path / "a" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    # In a process of its own: readers that fail in the background report to whoever runs later.
    code, stderr = inspect_alone(tmp_path / "a")
    assert code == 2
    assert stderr.startswith(f"sparsity: error: {tmp_path / 'a'} cannot be read: ")
    assert stderr.count("\n") == 1
    assert "tensorstore_spec" not in stderr


def test_files_that_are_cut_off_or_missing_are_one_line(tmp_path, capfd):
    tree = {"w": np.ones((8, 8)), "x": {"y": np.zeros(4)}}
    for database in (True, False):
        path = tmp_path / str(database)
        save_orbax_layout(path, tree, database=database)
        capfd.readouterr()
        for file in sorted(path.rglob("*")):
            if not file.is_file() or file.name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
                continue
            data = file.read_bytes()
            for damaged in (data[: len(data) // 2], b"", None):
                file.unlink() if damaged is None else file.write_bytes(damaged)
                code = main(["inspect", str(path), "--json"])
                stderr = capfd.readouterr().err
                # Files that the final database does not name are not read.
                assert (code, stderr.count("\n")) in {(2, 1), (0, 0)}, file
                assert code == 2 or "process_0" in str(file)
                file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunk", "message"),
    [
        ([1 << 44, 32], [64, 32], "chunks of 'w' are missing"),
        ([1 << 44, 32], [1 << 44, 32], "Unable to allocate"),
        ([64, 32], [1 << 44, 32], "larger than its"),
        ([128, 32], [64, 32], "missing"),
        ([-64, 32], [64, 32], "shape"),
    ],
)
def test_sizes_that_lie_are_refused(tmp_path, zarr3, shape, chunk, message):
    save_orbax_layout(
        tmp_path / "a", {"w": np.ones((64, 32), np.float32)}, database=False, zarr3=zarr3
    )
    file = tmp_path / "a" / "w" / ("zarr.json" if zarr3 else ".zarray")
    described = json.loads(file.read_text())
    described["shape"] = shape
    if zarr3:
        described["chunk_grid"]["configuration"]["chunk_shape"] = chunk
        described["codecs"][0]["configuration"]["chunk_shape"] = chunk
    else:
        described["chunks"] = chunk
    file.write_text(json.dumps(described))
    code, stderr = inspect_alone(tmp_path / "a")
    assert code == 2
    assert stderr.count("\n") == 1
    assert message in stderr


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, capsys):
    save_orbax_layout(tmp_path / "a", {"w": np.ones((2, 2))}, database=False)
    metadata = tmp_path / "a" / "_METADATA"
    metadata.write_text(metadata.read_text().replace('"key": "w"', '"key": "../b/w"'))
    assert main(["inspect", str(tmp_path / "a")]) == 2
    assert "'../b/w' leads out of the folder" in capsys.readouterr().err
