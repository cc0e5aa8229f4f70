"""The example with an epoch strategy and sparse activations."""

import re

import numpy as np
import pytest

import sparsity
from examples.mnist import data, epoch_strategy, report, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_digits")]


@pytest.fixture(scope="module")
def run():
    """An experiment of three epochs of four steps, pruned after the first and the second."""
    config = epoch_strategy.get_config()
    config.epochs = 3
    kinds = [entry[1:] for entry in config.sparsity.strategy]
    config.sparsity.strategy = tuple((i + 1, *kind) for i, kind in enumerate(kinds))
    experiment = train.make_experiment(config)
    return experiment, train.fit(experiment, train.start(experiment))


def test_the_configuration_prunes_to_2_of_4_at_a_middle_epoch_and_later_to_1_of_4():
    config = epoch_strategy.get_config()
    (first, *to_half), (second, *to_quarter) = config.sparsity.strategy
    assert 0 < first < second < config.epochs
    assert to_half == ["str_unified_local", (2, 4)]
    assert to_quarter == ["str_unified_local", (1, 4)]
    assert dict(config.activations) == {"conv1": 0.9, "conv2": (2, 4)}


def test_weights_end_with_1_of_4_and_the_dense_network_stays_dense(run):
    experiment, end = run
    for role, most in (("dense", 4), ("sparse", 1)):
        params = experiment.networks[role].used_params(end.state.trained[role])
        for layer in params.values():
            groups = np.split(layer["kernel"], range(4, layer["kernel"].shape[-1], 4), axis=-1)
            assert max((np.asarray(g) != 0).sum(axis=-1).max() for g in groups) == most


def test_only_the_sparse_network_has_sparse_activations(run):
    experiment, _ = run
    batch = data.batch(experiment.train, 100, seed=0, step=0)
    networks = experiment.networks.values()  # both start with the same weights
    dense, sparse = (float(n.train_step(n.init(), batch)[1]) for n in networks)
    assert dense != pytest.approx(sparse, rel=1e-6)


def test_accuracy_is_printed_before_and_after_each_pruning_and_after_the_recovery(run, capsys):
    experiment, end = run
    updater = experiment.networks["sparse"].updater
    assert isinstance(updater, sparsity.EpochStrategy)
    report.print_prunings(updater, end.history["evaluations"])
    rows = re.findall(r"^│ (\d+) +│(.*)│$", capsys.readouterr().out, re.MULTILINE)
    shown = {int(epoch): re.findall(r"[\d.]+%", cells) for epoch, cells in rows}
    actual = {row["step"]: row for row in end.history["evaluations"]}
    for epoch, steps in ((1, (4, 5, 8)), (2, (8, 9, 12))):
        expected = [actual[step]["sparse"]["accuracy"] for step in steps]
        expected.append(actual[steps[-1]]["dense"]["accuracy"])
        assert shown[epoch] == [f"{accuracy:.1%}" for accuracy in expected]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activations", (("conv3", 0.9),), "Did you mean 'conv"),
        ("sparsity.strategy", (), r"strategy must be \(\(epoch, method"),
        ("sparsity.strategy", ((1, "str_global"),), r"strategy must be \(\(epoch, method"),
        ("sparsity.strategy", ((30, "str_global", (2, 4)),), "between 0 and 30"),
        ("sparsity.strategy", ((3, "str_globl", (2, 4)),), "Did you mean 'str_global'"),
    ],
)
def test_bad_options_are_errors_before_training(name, value, message):
    config = epoch_strategy.get_config()
    config.update_from_flattened_dict({name: value})
    with pytest.raises(ValueError, match=message):
        train.make_experiment(config)
