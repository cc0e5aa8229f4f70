"""The README's programs and the trainer, run as users run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import sparsity
from examples.mnist import config as config_lib
from examples.mnist import train
from examples.mnist.report import print_report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(240)  # compiles and trains; slow where cores are shared


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_the_programs_of_the_readme_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_readme_names_every_algorithm_and_no_other():
    named = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", README, re.MULTILINE)
    registry = {name: algorithm.__name__ for name, algorithm in sparsity.ALGORITHM_REGISTRY.items()}
    assert dict(named) == registry


def tiny_config(**sparsity_options):
    config = config_lib.get_config()
    config.update({"epochs": 1, "batch_size": 200, "timed_steps": 1})
    config.sparsity.update(
        {"update_freq": 2, "update_start_step": 2, "update_end_step": 12} | sparsity_options
    )
    return config


def test_the_command_trains_both_networks_and_prints_a_table():
    flags = {"epochs": 1, "batch_size": 200, "timed_steps": 1, "sparsity.update_freq": 2}
    result = run_trainer(*(f"--config.{name}={value}" for name, value in flags.items()))
    assert result.returncode == 0, result.stderr
    for expected in ("test accuracy", "against dense", "454,688", "90.0%", "hidden/kernel"):
        assert expected in result.stdout
    assert result.stderr.count("20/20") == 2  # the progress bars


@pytest.fixture(scope="module")
def dense():
    experiment = train.make_experiment(tiny_config())
    network = train.fit(experiment.dense, experiment)
    assert network.accuracy(network.state, experiment.test) > 0.7
    return network


@pytest.mark.parametrize(
    ("options", "expected", "mask_bytes"),
    [
        # Rows of 32, 64, 128 and 10 bits make 4, 8, 16 and 2 bytes.
        (
            {"algorithm": "rigl", "use_packed_masks": True, "sparsity": 0.5},
            0.5,
            25 * 4 + 800 * 8 + 3136 * 16 + 128 * 2,
        ),
        ({"algorithm": "magnitude_ste"}, 0.9, 0),
        ({"sparsity_type": "nm_2,4"}, 0.5, 51_200 + 401_408),
    ],
    ids=["rigl packed", "magnitude_ste", "nm_2,4"],
)
def test_training_learns_and_reaches_its_sparsity(dense, options, expected, mask_bytes, capsys):
    experiment = train.make_experiment(tiny_config(**options))
    sparse = train.fit(experiment.sparse, experiment)
    assert sparse.accuracy(sparse.state, experiment.test) > 0.15

    kernel = sparse.used_params()["hidden"]["kernel"]
    assert (kernel == 0).mean() == pytest.approx(expected, abs=1e-4)
    masks = sparsity.get_sparse_state(sparse.state.opt_state).masks
    assert sum(mask.nbytes for mask in jax.tree.leaves(masks)) == mask_bytes

    print_report(dense, sparse, experiment.train, experiment.test, timed_steps=1, batch_size=200)
    assert f"{mask_bytes:,}" in capsys.readouterr().out


def test_both_networks_start_from_the_same_weights():
    experiment = train.make_experiment(tiny_config())
    dense, sparse = experiment.dense.state.params, experiment.sparse.state.params
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), dense, sparse))


def test_the_digits_are_split_evenly_and_do_not_overlap():
    digits, test = train.load_digits()
    assert [int((digits.labels == k).sum()) for k in range(10)] == [400] * 10
    assert [int((test.labels == k).sum()) for k in range(10)] == [100] * 10
    assert 0.0 == digits.images.min() < digits.images.max() == 1.0
    seen = {image.tobytes() for image in digits.images}
    assert not any(image.tobytes() in seen for image in test.images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rigll"}, "Did you mean 'rigl'"),
        ({"sparsity": 1.5}, r"must be in \[0, 1\], got sparsity = 1.5"),
        ({"dist_type": "erq"}, "Did you mean 'erk'"),
        ({"sparsity_type": "nm_5,4"}, "n must be at most m"),
        ({"sparsity_type": "nm_2,5"}, "conv2/kernel"),
        ({"sparsity_type": "mn_2,4"}, "mn_2,4"),
        ({"drop_fraction": 0.3}, "drop_fraction"),
        ({"update_end_step": 1}, "update_end_step must not come before"),
        ({"update_end_step": 20}, "before the end of training after 20 steps"),
    ],
)
def test_a_bad_value_is_an_error_before_training(options, message):
    with pytest.raises(ValueError, match=message):
        train.make_experiment(tiny_config(**options))


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("batch_size", 4001), ("learning_rate", float("nan")), ("seed", -1)],
)
def test_a_bad_option_is_named(name, value):
    config = tiny_config()
    config[name] = value
    with pytest.raises(ValueError, match=f"--config.{name} must"):
        train.make_experiment(config)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--config.sparsity.algorithm=rigll", "Did you mean 'rigl'"),
        ("--config.sparsity.algoritm=rigl", "Did you mean --config.sparsity.algorithm?"),
        ("--config.epochs=many", "--config.epochs=many"),
        ("--config=4", "no option --config."),
        ("--nonsense=1", "nonsense"),
        ("stray", "'stray' is no option"),
    ],
)
def test_a_bad_flag_is_one_clear_line(flag, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", flag])
    with pytest.raises(SystemExit) as exit_info:
        train.main()
    line = str(exit_info.value.code)  # which Python prints to stderr, with exit status 1
    assert line.startswith("error: ")
    assert expected in line
    assert "\n" not in line


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
    printed = capsys.readouterr().out
    for name, (_, meaning) in config_lib.OPTIONS.items():
        assert f"  {name} (" in printed
        assert meaning in printed


def test_flags_reach_the_configuration(monkeypatch):
    flags = ["epochs=3", "sparsity.algorithm=set", "sparsity.drop_fraction=0.2"]
    arguments = [f"--config.{flag}" for flag in flags] + ["--config.sparsity.use_packed_masks"]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    config = config_lib.from_command_line()
    assert config.epochs == 3
    assert config.sparsity.algorithm == "set"
    assert config.sparsity.drop_fraction == 0.2
    assert config.sparsity.use_packed_masks is True
    assert config.sparsity.rng_seed is None


def run_trainer(*flags):
    return subprocess.run(
        [sys.executable, "-P", "-m", "examples.mnist.train", *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
