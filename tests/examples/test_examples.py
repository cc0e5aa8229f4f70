"""The trainer, run as users run it."""

import functools
import json
import os
import subprocess
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

import sparsity
from examples.mnist import config as config_lib, train
from tests.examples.runs import write_few_digits
from tests.helpers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_digits")]


# ml_collections loads a file in a way that Python will drop.
loads_a_file = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def tiny_config(**sparsity_options):
    config = config_lib.get_config()
    config.update({"epochs": 1, "batch_size": 20, "eval_every": 10})
    config.sparsity.update(
        {"update_freq": 2, "update_start_step": 2, "update_end_step": 12} | sparsity_options
    )
    return config


def fit(config):
    """Trains; returns the experiment and how it ended."""
    experiment = train.make_experiment(config)
    return experiment, train.fit(experiment, train.start(experiment))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_few_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(scope="module")
def first_run(run_dir, data_dir):
    flags = {"epochs": 1, "batch_size": 20, "eval_every": 5, "sparsity.update_freq": 2}
    arguments = [f"--config.{name}={value}" for name, value in flags.items()]
    return run_trainer(
        *arguments, f"--run_dir={run_dir}", f"--data_dir={data_dir}", "--tensorboard"
    )


def test_the_command_trains_both_networks_and_prints_a_table(first_run):
    assert first_run.returncode == 0, first_run.stderr
    for expected in ("test accuracy", "against dense", "454,688", "90.0%", "hidden/kernel"):
        assert expected in first_run.stdout
    assert "20/20" in first_run.stderr
    for expected in ("loss", "accuracy", "sparsity 90.0%", "step"):
        assert expected in first_run.stderr.splitlines()[-1]


def test_the_command_leaves_pictures_that_differ_by_background(first_run, run_dir):
    assert first_run.returncode == 0
    for name in ("accuracy", "layers", "first_layer", "moves"):
        light, dark = (plt.imread(run_dir / f"{name}_{theme}.png") for theme in ("light", "dark"))
        assert light.shape == dark.shape
        assert np.median(light[..., :3]) > 0.8 > 0.2 > np.median(dark[..., :3])
        assert light[..., :3].std() > 0.05


def test_the_command_leaves_the_history_and_events(first_run, run_dir):
    assert first_run.returncode == 0
    history = json.loads((run_dir / "history.json").read_text())
    assert [row["step"] for row in history["evaluations"]] == [5, 10, 15, 20]
    assert [row["step"] for row in history["mask_updates"]] == [5, 7, 9, 11, 13]
    (events,) = (run_dir / "tensorboard").iterdir()
    content = events.read_bytes()
    for tag in ("accuracy/dense", "sparsity_by_layer/conv2/kernel", "churn/total"):
        assert tag.encode() in content
    for tag in ("ever_active/hidden/kernel", "masks/conv1/kernel", "sparse_nonzeros/logits/bias"):
        assert tag.encode() in content


def test_the_command_over_its_own_run_goes_on(first_run, run_dir, data_dir):
    assert first_run.returncode == 0
    config = tiny_config(update_start_step=None, update_end_step=None)
    config.eval_every = 5
    run = train.prepare(config_lib.Options(config, data_dir, run_dir, False, False))
    run.checkpoints.close()
    assert run.begin.step == 20
    assert run.begin.history == json.loads((run_dir / "history.json").read_text())


def test_another_configuration_over_an_old_run_is_one_line_with_the_remedy(
    first_run, run_dir, data_dir, monkeypatch
):
    assert first_run.returncode == 0
    before = sorted(path.name for path in run_dir.rglob("*"))
    line = error_of_main(
        monkeypatch, f"--run_dir={run_dir}", f"--data_dir={data_dir}", "--config.epochs=2"
    )
    for expected in ("config.epochs was 1, is 2", "batch_size was 20, is 100", "--restart"):
        assert expected in line
    assert sorted(path.name for path in run_dir.rglob("*")) == before


OPTIONS = {
    "rigl packed": {"algorithm": "rigl", "use_packed_masks": True, "sparsity": 0.5},
    "magnitude_ste": {"algorithm": "magnitude_ste"},
    "nm_2,4": {"sparsity_type": "nm_2,4"},
}


@pytest.fixture(scope="module")
def trained():
    """Trains with the options of that name, once."""
    return functools.cache(lambda name: fit(tiny_config(**OPTIONS[name])))


@pytest.mark.parametrize(
    ("name", "other", "expected", "mask_bytes"),
    [
        # Rows of 32, 64, 128 and 10 bits make 4, 8, 16 and 2 bytes.
        ("rigl packed", "magnitude_ste", 0.5, 25 * 4 + 800 * 8 + 3136 * 16 + 128 * 2),
        ("magnitude_ste", "nm_2,4", 0.9, 0),
        ("nm_2,4", "rigl packed", 0.5, 51_200 + 401_408),
    ],
)
def test_training_learns_and_reaches_its_sparsity(trained, name, other, expected, mask_bytes):
    experiment, end = trained(name)
    assert end.history["evaluations"][-1]["dense"]["accuracy"] > 0.7
    state, network = end.state.trained["sparse"], experiment.networks["sparse"]
    row = end.history["evaluations"][-1]["sparse"]
    assert row["accuracy"] == network.accuracy(state, experiment.test) > 0.15

    used = network.used_params(state)
    assert (used["hidden"]["kernel"] == 0).mean() == pytest.approx(expected, abs=1e-4)
    assert row["layers"]["hidden/kernel"] == float((np.array(used["hidden"]["kernel"]) == 0).mean())
    masks = sparsity.get_sparse_state(state.opt_state).masks
    assert sum(mask.nbytes for mask in jax.tree.leaves(masks)) == mask_bytes

    # The dense network is none of the algorithm's business.
    dense = (run.state.trained["dense"] for run in (end, trained(other)[1]))
    for a, b in zip(*map(jax.tree.leaves, dense), strict=True):
        np.testing.assert_array_equal(a, b)


def test_both_networks_start_from_the_same_weights():
    trained = train.start(train.make_experiment(tiny_config())).state.trained
    params = trained["dense"].params, trained["sparse"].params
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), *params))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rigll"}, "Did you mean 'rigl'"),
        ({"sparsity": 1.5}, r"must be in \[0, 1\] .* got sparsity = 1.5"),
        ({"dist_type": "erq"}, "Did you mean 'erk'"),
        ({"sparsity_type": "nm_5,4"}, "n must be at most m"),
        ({"sparsity_type": "nm_2,5"}, "conv2/kernel"),
        ({"sparsity_type": "mn_2,4"}, "mn_2,4"),
        ({"drop_fraction": 3.0}, r"drop_fraction must be in \[0, 1\]"),
        ({"update_end_step": 1}, "update_end_step must not come before"),
        ({"update_end_step": 20}, "before the end of training after 20 steps"),
    ],
)
def test_a_bad_value_is_an_error_before_training(options, message):
    with pytest.raises(ValueError, match=message):
        train.start(train.make_experiment(tiny_config(**options)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 4001),
        ("learning_rate", float("nan")),
        ("eval_every", 0),
        ("seed", -1),
    ],
)
def test_a_bad_option_is_named(name, value):
    config = tiny_config()
    config[name] = value
    with pytest.raises(ValueError, match=f"--config.{name} must"):
        train.make_experiment(config)


def error_of_main(monkeypatch, *arguments):
    """What the command prints to stderr; Python does so for a text given to `sys.exit`."""
    monkeypatch.setattr(train, "use_compilation_cache", lambda: None)
    monkeypatch.delattr(train, "fit")
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        train.main()
    line = str(exit_info.value.code)
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


@loads_a_file
@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--config.sparsity.algorithm=rigll", "Did you mean 'rigl'"),
        ("--config.sparsity.algoritm=rigl", 'Did you mean "algorithm"'),
        ("--config.epochs=many", "--config.epochs=many"),
        ("--config=nowhere.py", "nowhere.py"),
        ("--nonsense=1", "There is no option --nonsense"),
        ("--rundir=x", "Did you mean --run_dir?"),
        ("--data_dir=/nowhere", "/nowhere has no file train-images-idx3-ubyte"),
        ("--run_dir=/proc/nowhere", "/proc/nowhere cannot be written"),
        ("stray", "'stray' is no option"),
    ],
)
def test_a_bad_flag_is_one_clear_line(flag, expected, monkeypatch):
    assert expected in error_of_main(monkeypatch, flag)


def test_a_bad_flag_is_a_failure_of_the_command():
    result = run_trainer("--config.sparsity.algorithm=rigll")
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "Did you mean 'rigl'" in line


def test_help_lists_every_option_with_its_meaning(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        train.main()
    assert not exit_info.value.code
    printed = " ".join(capsys.readouterr().out.split())
    options = {f"config.{name}": option for name, option in config_lib.CONFIG.items()}
    for name, option in (options | config_lib.FLAGS).items():
        assert f" --{name} " in printed
        assert option[-1] in printed


def test_flags_reach_the_configuration(monkeypatch):
    flags = ["epochs=3", "sparsity.algorithm=set", "sparsity.drop_fraction=0.2"]
    arguments = [f"--config.{flag}" for flag in flags] + ["--config.sparsity.use_packed_masks"]
    monkeypatch.setattr(sys, "argv", ["train", *arguments, "--data_dir=here", "--restart"])
    options = config_lib.from_command_line()
    assert options.config.epochs == 3
    assert options.config.sparsity.algorithm == "set"
    assert options.config.sparsity.drop_fraction == 0.2
    assert options.config.sparsity.use_packed_masks is True
    assert options.config.sparsity.rng_seed is None
    assert options.run_dir == ROOT / "runs" / "mnist" / "set"
    assert (options.data_dir, options.restart, options.tensorboard) == ("here", True, False)


FILE = """
from examples.mnist import config as config_lib

def get_config():
    config = config_lib.get_config()
    config.epochs = 7
    config.sparsity.algorithm = "set"
    return config
"""


@loads_a_file
def test_a_configuration_file_is_read_and_flags_go_before_it(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    arguments = [f"--config={tmp_path / 'mine.py'}", "--config.sparsity.sparsity=0.7"]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    config = config_lib.from_command_line().config
    assert (config.epochs, config.sparsity.algorithm, config.sparsity.sparsity) == (7, "set", 0.7)


@loads_a_file
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = (", "never closed"),
        (FILE.replace("epochs", "epoch"), "epochs"),
        ("import ml_collections\nget_config = ml_collections.ConfigDict", "does not set seed"),
    ],
)
def test_a_bad_configuration_file_is_one_clear_line(monkeypatch, tmp_path, text, expected):
    (tmp_path / "bad.py").write_text(text)
    assert expected in error_of_main(monkeypatch, f"--config={tmp_path / 'bad.py'}")


def run_trainer(*flags):
    return subprocess.run(
        [sys.executable, "-P", "-m", "examples.mnist.train", *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
