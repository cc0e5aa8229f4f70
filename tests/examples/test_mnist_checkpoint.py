"""The example's checkpoints: whole or not there, and never those of another configuration."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from examples.mnist.checkpoint import Checkpoint, Checkpoints

# Threads of orbax's storage library may still complain when a read has failed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.slow,
]

CONFIG = {"data_dir": None, "config": {"seed": 0, "sparsity": {"algorithm": "rigl"}}}


def state(seed):
    """A tree with masks, `None`, an optimizer state, scalars and a NaN."""
    config = {"algorithm": "rigl", "sparsity": 0.5, "use_packed_masks": True, "rng_seed": seed}
    config["update_freq"] = 9
    params = {"w": jax.random.normal(jax.random.key(seed), (20, 30)), "b": jnp.full(3, jnp.nan)}
    tx = sparsity.create_updater_from_config(config).wrap_optax(optax.adam(0.1))
    return {"params": params, "opt_state": tx.init(params)}


def like(history, arrays):
    """A state of the same structure, whatever was measured."""
    return state(0)


def history(step):
    return {"evaluations": [{"step": step, "dense": {"loss": 0.1 * step}}], "mask_updates": []}


def checkpoint(step):
    return Checkpoint(step, state(step), history(step))


def bits(tree):
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in jax.tree.leaves(tree)]


def same(one, other):
    return (one.step, one.history, bits(one.state)) == (
        other.step,
        other.history,
        bits(other.state),
    ) and jax.tree.structure(one.state) == jax.tree.structure(other.state)


@pytest.fixture
def opened():
    """Opens run folders, and closes them after the test."""
    actual = []

    def open_folder(folder, config=CONFIG, restart=False):
        actual.append(Checkpoints(folder, config, restart))
        return actual[-1]

    yield open_folder
    for checkpoints in actual:
        checkpoints.close()


def write(folder, *steps):
    with closing(Checkpoints(folder, CONFIG)) as checkpoints:
        for step in steps:
            checkpoints.save(checkpoint(step))


def test_a_new_folder_holds_no_checkpoint(tmp_path, opened):
    assert opened(tmp_path / "a" / "b").restore(like) is None


def test_what_was_saved_comes_back_with_the_same_bits(tmp_path, opened):
    write(tmp_path, 3)
    assert same(opened(tmp_path).restore(like), checkpoint(3))


def test_the_last_three_are_kept(tmp_path):
    write(tmp_path, 1, 2, 5, 7)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["2", "5", "7"]


def test_what_an_interrupted_write_has_left_is_removed(tmp_path, opened):
    write(tmp_path, 1, 2)
    written = tmp_path / "checkpoints" / "2"
    written.rename(written.with_name("2.orbax-checkpoint-tmp"))
    with closing(Checkpoints(tmp_path, CONFIG)) as checkpoints:
        assert same(checkpoints.restore(like), checkpoint(1))
        checkpoints.save(checkpoint(2))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["cut", "flip", "delete"])
def test_whatever_file_is_damaged_the_contents_are_right_or_those_before(
    tmp_path, opened, damage, capsys
):
    write(tmp_path / "run", 1, 2)
    newest = Path("checkpoints", "2")
    files = [p for p in (tmp_path / "run" / newest).rglob("*") if p.is_file() and p.stat().st_size]
    fell_back = 0
    for index, path in enumerate(files):
        run = tmp_path / str(index)
        shutil.copytree(tmp_path / "run", run)
        damage(run / path.relative_to(tmp_path / "run"))
        actual = opened(run).restore(like)
        said = capsys.readouterr().err
        if actual.step == 1:
            fell_back += 1
            assert "The checkpoint of step 2 is damaged" in said
            assert "Going on from the one of step 1" in said
            assert not (run / newest).exists()
        assert same(actual, checkpoint(actual.step))
    assert fell_back >= 3  # the arrays, the history, and what describes them


def test_an_empty_folder_in_place_of_a_checkpoint_is_a_damaged_one(tmp_path, opened, capsys):
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / "2").mkdir()
    assert opened(tmp_path).restore(like).step == 1
    assert "step 2 is damaged" in capsys.readouterr().err


def test_a_damaged_step_can_be_written_again(tmp_path, opened):
    write(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "state")
    with closing(Checkpoints(tmp_path, CONFIG)) as checkpoints:
        assert checkpoints.restore(like).step == 1
        checkpoints.save(checkpoint(2))
    assert same(opened(tmp_path).restore(like), checkpoint(2))


def test_when_all_are_damaged_nothing_is_removed_and_the_remedy_is_named(tmp_path, opened):
    write(tmp_path, 1, 2)
    for step in "12":
        shutil.rmtree(tmp_path / "checkpoints" / step / "state")
    with pytest.raises(ValueError, match=r"All checkpoints in .* are damaged; --restart"):
        opened(tmp_path).restore(like)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def test_another_configuration_is_an_error_that_lists_the_differences(tmp_path, opened):
    write(tmp_path, 1)
    other = {"data_dir": None, "config": {"seed": 1, "sparsity": {"algorithm": "set"}}}
    with pytest.raises(ValueError, match=r"seed was 0, is 1.*algorithm was 'rigl', is 'set'.*--re"):
        opened(tmp_path, other).restore(like)
    assert (tmp_path / "checkpoints" / "1").is_dir()


def test_restart_forgets_the_old_run_and_only_that(tmp_path, opened):
    write(tmp_path, 1)
    (tmp_path / "notes.txt").touch()
    assert opened(tmp_path, restart=True).restore(like) is None
    assert (tmp_path / "notes.txt").exists()


def test_a_model_of_other_shapes_is_an_error(tmp_path, opened):
    write(tmp_path, 1)
    with pytest.raises(ValueError, match="another model"):
        opened(tmp_path).restore(lambda history, arrays: {"w": np.zeros(3)})


def test_two_runs_in_one_folder_are_refused(tmp_path, opened):
    first = opened(tmp_path)
    first.save(checkpoint(1))
    with pytest.raises(ValueError, match="another run is writing"):
        opened(tmp_path, restart=True)
    assert first.restore(like).step == 1


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/no_such_folder"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, opened, place):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--run_dir: .*{place} cannot be written"):
        opened(tmp_path / place)
