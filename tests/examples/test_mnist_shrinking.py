"""The example's run that cuts its network: what goes, what goes on, and from which checkpoint."""

import shutil

import jax
import numpy as np
import pytest

import sparsity
from examples.mnist import config as config_lib, train
from tests import kill_resume
from tests.examples.runs import run_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_digits")]

CUT_STEP, STEPS = 13, 20


def make_config(shrink=True, **options):
    config = config_lib.get_config()
    config.update({"epochs": 1, "batch_size": 20, "eval_every": 5, "shrink": shrink})
    config.sparsity.update(
        {"scope": "coupled", "update_freq": 2, "update_start_step": 2, "update_end_step": 12}
        | options
    )
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def cut_run(folder):
    return run_in(folder, make_config())


def test_channels_are_cut_when_masks_are_final_until_a_quarter_of_the_macs_is_left(cut_run):
    _, end = cut_run
    assert [row["step"] for row in end.history["cuts"]] == [CUT_STEP]
    assert max(row["step"] for row in end.history["mask_updates"]) == CUT_STEP
    shapes = jax.tree.map(np.shape, end.state.trained["sparse"].params)
    (*_, first), (*_, second), (places, hidden) = (
        shapes[name]["kernel"] for name in ("conv1", "conv2", "hidden")
    )
    assert shapes["conv2"]["kernel"][2] == first < 32
    assert places == 49 * second < 49 * 64
    # 14 x 14 places of 25 inputs, 7 x 7 of 25 x first, and two dense layers.
    small_macs = 4900 * first + 1225 * first * second + 49 * second * hidden + 10 * hidden
    assert 0.22 < small_macs / 3_068_288 <= 0.25


def test_the_smaller_network_trains_as_the_masked_one_would_have(cut_run):
    run, end = cut_run
    experiment = train.make_experiment(make_config(shrink=False))
    masked = train.fit(experiment, train.start(experiment)).state.trained["sparse"].params
    plan = sparsity.Plan.from_json(end.history["cuts"][0]["plan"])
    graph = run.experiment.networks["sparse"].updater.scope.graph
    expected = sparsity.shrink(graph, masked, plan).params
    for actual, other in zip(
        jax.tree.leaves(end.state.trained["sparse"].params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(actual, other, atol=1e-4)


@pytest.mark.parametrize("step", [10, 15], ids=["before the cut", "after it"])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(cut_run, folder, tmp_path, step):
    _, expected = cut_run
    shutil.copytree(folder / "checkpoints" / str(step), tmp_path / "checkpoints" / str(step))
    run, end = run_in(tmp_path, make_config())
    assert run.begin.step == step
    assert kill_resume.differences(end, expected) == []


def test_the_tables_say_what_became_smaller_and_the_times_before_and_after(
    cut_run, tmp_path, capsys
):
    run, end = cut_run
    train.finish(run.experiment, end, tmp_path)
    printed = capsys.readouterr().out
    for expected in ("magnitude, cut", "454,922", "3,068,288", "before", "after", "ratio"):
        assert expected in printed
    for what in ("training step", "inference of 100 images"):
        (line,) = [line for line in printed.splitlines() if what in line]
        assert line.count(" ms") == 2
    pictures = {path.name for path in tmp_path.glob("*_light.png")}
    assert pictures == {"accuracy_light.png", "moves_light.png"}


def test_straight_through_weights_without_stored_masks_are_cut_too():
    experiment = train.make_experiment(make_config(algorithm="magnitude_ste", sparsity=0.5))
    trained = train.fit(experiment, train.start(experiment)).state.trained["sparse"]
    assert trained.params["hidden"]["kernel"].shape == (49 * 32, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": None}, "needs --config.sparsity.scope=coupled, got None"),
        ({"algorithm": "epoch_strategy"}, "epoch_strategy has no --config.sparsity.scope"),
        ({"algorithm": "global_magnitude"}, "global_magnitude"),
        ({"sparsity": 0.5, "macs": 0.5}, "one of --config.sparsity.sparsity and .*macs"),
        ({"macs": 1.5}, r"macs .*\(0, 1\].*1.5"),
        ({"update_end_step": 19}, "update_end_step must come before the end"),
        ({"sparsity_type": "nm_2,4"}, "Coupled removes whole channels"),
    ],
)
def test_what_cannot_be_cut_is_an_error_before_training(options, message):
    with pytest.raises(ValueError, match=message):
        train.make_experiment(make_config(**options))
