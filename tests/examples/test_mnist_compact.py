"""The example trains kept values only: where it begins, how it ends, and how it resumes."""

import shutil

import jax
import numpy as np
import pytest

import sparsity
from examples.mnist import compacting, config as config_lib, data, train
from tests import kill_resume
from tests.examples.runs import run_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_digits")]

COMPACT_STEP, STEPS = 13, 20


def make_config(algorithm, compact=True, **options):
    config = config_lib.get_config()
    config.update({"epochs": 1, "batch_size": 20, "eval_every": 5, "compact": compact})
    config.sparsity.update(
        {"algorithm": algorithm, "update_freq": 2, "update_start_step": 2, "update_end_step": 12}
        | options
    )
    return config


@pytest.fixture(scope="module")
def rigl_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rigl")
    return folder, *run_in(folder, make_config("rigl"))


@pytest.fixture(scope="module")
def pruned_run(tmp_path_factory):
    """A run with a ramp, whose layers keep numbers of weights that only the masks tell."""
    folder = tmp_path_factory.mktemp("pruned")
    return folder, *run_in(folder, make_config("global_magnitude"))


def masked_end(run, end):
    network = train.after_changes(run.experiment, end.history).networks["sparse"]
    return network, compacting.masked_state(network, end.state.trained["sparse"])


def resume(folder, step, tmp_path, algorithm):
    shutil.copytree(folder / "checkpoints" / str(step), tmp_path / "checkpoints" / str(step))
    run, end = run_in(tmp_path, make_config(algorithm))
    assert run.begin.step == step
    return end


def test_rigl_holds_kept_values_from_the_first_step_and_moves_masks(rigl_run):
    _, run, end = rigl_run
    assert [row["step"] for row in end.history["compactions"]] == [0]
    assert [row["step"] for row in end.history["mask_updates"]] == [3, 5, 7, 9, 11, 13]
    churn = [row["churn"]["total"] for row in end.history["mask_updates"]]
    assert min(churn[:-1]) > 0 == churn[-1]  # along a cosine
    state = end.state.trained["sparse"]
    assert state.params["hidden"]["kernel"].shape == (40_141,)  # a tenth of 3136 * 128, rounded
    moments = state.opt_state.inner_state[0].mu
    assert jax.tree.map(np.shape, moments) == jax.tree.map(np.shape, state.params)
    network, (params, opt_state) = masked_end(run, end)
    assert (
        (params["hidden"]["kernel"] != 0).sum()
        <= 40_141
        == opt_state.masks["hidden"]["kernel"].sum()
    )
    row = end.history["evaluations"][-1]["sparse"]
    accuracy = network.accuracy(network.view(state), run.experiment.test)
    assert row["accuracy"] == accuracy > 0.15


def test_a_step_that_moves_masks_trains_nothing_but_counts(rigl_run):
    _, run, end = rigl_run
    network = train.after_changes(run.experiment, end.history).networks["sparse"]
    state = end.state.trained["sparse"]
    state = state._replace(opt_state=state.opt_state._replace(count=np.int32(2)))
    batch = data.batch(run.experiment.train, 20, 0, 2)
    before = jax.tree.map(np.array, network.view(state))
    step, count = state.opt_state.inner_state[0].count.item(), state.opt_state.count.item()
    moved, _ = network.move_step(jax.tree.map(np.array, state), batch)
    after = network.view(moved)
    old, new = (np.asarray(view.opt_state.masks["hidden"]["kernel"]) for view in (before, after))
    assert old.sum() == new.sum()
    assert (old != new).any()
    kernel = np.where(old & new, before.params["hidden"]["kernel"], 0)
    np.testing.assert_array_equal(after.params["hidden"]["kernel"], kernel)
    assert moved.opt_state.inner_state[0].count == step
    assert moved.opt_state.count == count + 1


def test_a_pruner_ends_as_the_masked_run_does(pruned_run):
    _, run, end = pruned_run
    assert [row["step"] for row in end.history["compactions"]] == [COMPACT_STEP]
    experiment = train.make_experiment(make_config("global_magnitude", compact=False))
    expected = train.fit(experiment, train.start(experiment)).state.trained["sparse"]
    _, (params, opt_state) = masked_end(run, end)
    jax.tree.map(np.testing.assert_array_equal, opt_state.masks, expected.opt_state.masks)
    assert opt_state.count == expected.opt_state.count == STEPS
    moments = opt_state.inner_state[0], expected.opt_state.inner_state[0]
    assert moments[0].count == moments[1].count
    for one, other in zip(*map(jax.tree.leaves, (params, expected.params)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_rigl_resumes_from_a_checkpoint_with_the_same_bits(rigl_run, tmp_path):
    folder, _, expected = rigl_run
    assert kill_resume.differences(resume(folder, 10, tmp_path, "rigl"), expected) == []


@pytest.mark.parametrize("step", [10, 15], ids=["before the last mask", "after it"])
def test_a_pruner_resumes_from_a_checkpoint_with_the_same_bits(pruned_run, tmp_path, step):
    folder, _, expected = pruned_run
    end = resume(folder, step, tmp_path, "global_magnitude")
    assert kill_resume.differences(end, expected) == []


def test_the_table_has_bytes_and_times_of_the_dense_the_compact_and_the_masked_step(
    rigl_run, tmp_path, capsys
):
    _, run, end = rigl_run
    train.finish(run.experiment, end, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    for name in ("bytes of a step", "time of a step"):
        (line,) = [line for line in lines if name in line]
        shown = [float(cell.strip(" ms").replace(",", "")) for cell in line.split("│")[2:5]]
        assert min(shown) > 0
        if name == "bytes of a step":
            assert shown[1] < 0.8 * shown[0] < shown[2]
    pictures = {path.name for path in tmp_path.glob("*_light.png")}
    expected = {"accuracy", "layers", "first_layer", "moves"}
    assert pictures == {f"{name}_light.png" for name in expected}


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("magnitude_ste", {}, "algorithm=magnitude_ste. Pruned weights keep values.*magnitude"),
        ("srigl", {}, "algorithm=srigl. Mask updates may change the number.*rigl"),
        ("global_rigl", {}, "algorithm=global_rigl. .*parameters may trade entries.*Use rigl"),
        ("no_prune", {}, "algorithm=no_prune. The algorithm has no masks"),
        ("set", {"sparsity_type": "block_3,3"}, "algorithm=set. .*'conv2/kernel'.*Block"),
        ("magnitude", {"update_end_step": 19}, "update_end_step must come before the end"),
    ],
)
def test_what_cannot_be_compact_is_an_error_before_training(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        train.start(train.make_experiment(make_config(algorithm, **options)))


def test_cutting_and_compact_training_exclude_each_other():
    config = make_config("magnitude", scope="coupled")
    config.shrink = True
    with pytest.raises(ValueError, match=r"config\.shrink and --config\.compact"):
        train.make_experiment(config)


def test_static_sparse_trains_kept_values_by_groups():
    config = make_config("static_sparse", sparsity_type="fanin_16", sparsity=0.9)
    config.update({"eval_every": 20})
    experiment = train.make_experiment(config)
    end = train.fit(experiment, train.start(experiment))
    assert end.history["compactions"][0]["formats"]["hidden/kernel"] == "grouped"
    assert {row["churn"]["total"] for row in end.history["mask_updates"]} == {0}
    assert sparsity.get_sparse_state(end.state.trained["sparse"].opt_state).masks is None
