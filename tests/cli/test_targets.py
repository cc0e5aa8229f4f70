"""Where copies are written: only a checkpoint is replaced, and when the new one is complete."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import sparsity
from sparsity.cli import main
from tests.cli.checkpoints import FORMATS, weights

try:
    import resource
except ImportError:  # Windows
    resource = None

HALF = ["--sparsity", "0.5"]
FILES = ["a.safetensors", "a.npz", "a.msgpack"]
WEIGHTS = {"w": np.arange(1, 17, dtype=np.float32).reshape(4, 4)}


def save(path):
    """Writes a file, or a folder of Orbax where the path has no ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **WEIGHTS)
    elif path.suffix == ".safetensors":
        safetensors.numpy.save_file(WEIGHTS, path)
    elif path.suffix == ".msgpack":
        path.write_bytes(flax.serialization.msgpack_serialize(WEIGHTS))
    else:
        ocp.PyTreeCheckpointer().save(path, WEIGHTS)
    return path


def files(folder):
    """Returns all that is in a folder: bytes of files, where links lead, folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def zeros(path):
    if path.suffix == ".npz":
        weights = np.load(path)
    elif path.suffix == ".safetensors":
        weights = safetensors.numpy.load_file(path)
    else:
        weights = ocp.PyTreeCheckpointer().restore(path)
    return np.count_nonzero(weights["w"] == 0)


@pytest.fixture
def refused(tmp_path, capsys):
    """Returns a function that asserts that nothing changes, and returns the error."""

    def check(source, target, *options):
        before = files(tmp_path)
        assert main(["prune", str(source), str(target), *HALF, *options]) == 2
        assert files(tmp_path) == before
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return check


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_checkpoint_takes_the_place_of_one_when_asked(tmp_path, refused, name):
    source, target = save(tmp_path / "x" / name), save(tmp_path / "y" / name)
    (target.parent / "notes.txt").write_text("kept")
    assert "--overwrite" in refused(source, target)
    assert main(["prune", str(source), str(target), *HALF, "--overwrite"]) == 0
    assert (zeros(source), zeros(target)) == (0, 8)
    assert {path.name for path in target.parent.iterdir()} == {name, "notes.txt"}
    assert main(["prune", str(source), str(source), *HALF, "--overwrite"]) == 0
    assert zeros(source) == 8


def test_folders_are_not_replaced(tmp_path, refused):
    source, other = save(tmp_path / "runs" / "1" / "default"), save(tmp_path / "other")
    for target in (tmp_path / "runs", source, other, Path("/")):
        assert "is not replaced" in refused(source, target, "--overwrite")


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_links_are_not_replaced(tmp_path, refused, options):
    source, other = save(tmp_path / "a.npz"), save(tmp_path / "other.npz")
    for name, leads_to in [("nowhere", "nothing.npz"), ("itself", source), ("other", other)]:
        link = tmp_path / f"to_{name}.npz"
        link.symlink_to(leads_to)
        error = refused(source, link, *options)
        assert ("is not replaced" if options else "exists") in error


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_what_is_no_file_is_not_replaced(tmp_path, refused, name):
    source, target = save(tmp_path / "x" / name), tmp_path / name
    target.mkdir()
    (target / "precious.txt").write_text("kept")
    assert "is not replaced" in refused(source, target, "--overwrite")
    shutil.rmtree(target)
    os.mkfifo(target)
    assert "is not replaced" in refused(source, target, "--overwrite")


def test_a_checkpoint_of_another_format_is_not_replaced(tmp_path, refused):
    file = save(tmp_path / "x" / "a.npz")
    assert "ending ''" in refused(save(tmp_path / "c"), file, "--overwrite")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_while_replacing_leaves_the_old_one(tmp_path, monkeypatch, error):
    source, target = save(tmp_path / "x" / "a.npz"), save(tmp_path / "a.npz")
    before = files(tmp_path)

    def fail(old, new):
        monkeypatch.undo()
        raise error("stop")

    monkeypatch.setattr(os, "replace", fail)
    command = ["prune", str(source), str(target), *HALF, "--overwrite"]
    if error is OSError:
        assert main(command) == 2
    else:
        with pytest.raises(KeyboardInterrupt):
            main(command)
    assert files(tmp_path) == before


def test_a_fifo_is_no_checkpoint(tmp_path, capsys):
    os.mkfifo(tmp_path / "a.npz")
    assert main(["inspect", str(tmp_path / "a.npz")]) == 2
    assert "has no known format" in capsys.readouterr().err


@pytest.mark.skipif(resource is None, reason="limits of files are of Unix")
@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(tmp_path, capsys, name):
    source, target = tmp_path / name, tmp_path / f"target{(tmp_path / name).suffix}"
    for path in (source, target):
        FORMATS[name][0](path, weights())
    before = target.read_bytes()
    command = ["prune", str(source), str(target), "--sparsity", "0.5", "--overwrite"]
    assert run_on_a_full_disk(lambda: main(command)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sparsity: error: {target} cannot be written: ")
    assert "File too large" in error
    assert error.count("\n") == 1
    assert target.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {source.name, target.name}


@pytest.mark.skipif(resource is None, reason="limits of files are of Unix")
def test_a_full_disk_leaves_the_old_delta(tmp_path):
    path, base = tmp_path / "delta.safetensors", {"w": np.zeros(500)}
    delta = sparsity.Delta.between(base, {"w": np.ones(500)})
    delta.save(path)
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"delta\.safetensors cannot be written: .*too large"):
        run_on_a_full_disk(lambda: delta.save(path))
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


@pytest.fixture
def read_only():
    """Returns a function that makes a folder read-only, also for the superuser, to the end."""
    users, folders = os.geteuid(), []

    def close(folder):
        folders.append(folder)
        for path in folder.rglob("*"):
            path.chmod(0o755)
        folder.chmod(0o555)
        if users == 0:
            os.seteuid(65534)

    yield close
    os.seteuid(users)
    for folder in folders:
        folder.chmod(0o755)


@pytest.fixture
def open_path():
    """Returns a folder that every user reaches."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(resource is None, reason="users are of Unix")
@pytest.mark.parametrize("name", FILES)
def test_a_read_only_folder_leaves_the_old_checkpoint(open_path, capsys, read_only, name):
    source = save(open_path / f"source{Path(name).suffix}")
    target = save(open_path / f"target{Path(name).suffix}")
    delta = open_path / "delta.safetensors"
    sparsity.Delta.between(WEIGHTS, {"w": 2 * WEIGHTS["w"]}).save(delta)
    before = files(open_path)
    read_only(open_path)
    new = str(open_path / f"new{target.suffix}")
    for command, path in [
        (["prune", str(source), str(target), *HALF, "--overwrite"], str(target)),
        (["prune", str(source), new, *HALF], new),
        (["apply", str(source), str(delta), str(target), "--overwrite"], str(target)),
        (["diff", str(source), str(target), "--save", new], new),
    ]:
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error == (
            f"sparsity: error: {path} cannot be written: Permission denied. Nothing there has "
            "changed.\n"
        )
    with pytest.raises(OSError, match=r"delta\.safetensors cannot be written: Permission denied"):
        sparsity.Delta.load(delta).save(delta)
    assert files(open_path) == before


def run_on_a_full_disk(run):
    """Runs a function while no file may hold more than a few bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        return run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
