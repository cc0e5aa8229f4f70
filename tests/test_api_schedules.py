"""Configurations of algorithms that have no use for a ramp, and their own settings."""

import pytest

import sparsity
from sparsity.api import create_updater_from_config as create


def config(**keys):
    return {"algorithm": "magnitude", "sparsity": 0.5} | keys


_FLAT = ["admm", "acdc", "top_kast", "set", "rigl", "global_rigl", "srigl"]
_STEPS = {"update_freq": 5, "update_start_step": 10, "update_end_step": 50}


@pytest.mark.parametrize("name", _FLAT)
def test_those_that_follow_no_ramp_get_a_period_and_what_they_ignore_is_logged(name, caplog):
    options = config(algorithm=name, **_STEPS)
    assert create(options).scheduler == sparsity.PeriodicSchedule(5, 10, 50)
    assert not caplog.records
    assert create(options | {"power": 1, "initial_sparsity": 0.2}) == create(options)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{name} follows no ramp: its schedule is 'periodic', which ignores "
        "initial_sparsity, power."
    )


@pytest.mark.parametrize("name", _FLAT)
def test_a_schedule_that_is_named_or_given_is_the_one(name):
    one = create(config(algorithm=name, schedule_type="one_shot", update_end_step=7))
    assert one.scheduler == sparsity.OneShotSchedule(7)
    ramp = sparsity.PolynomialSchedule(5, 10, 50)
    named = create(config(algorithm=name, schedule_type="polynomial", **_STEPS))
    assert named.scheduler == ramp
    assert create(config(algorithm=name, scheduler=ramp)).scheduler == ramp


def test_snip_refuses_a_ramp_that_is_named():
    with pytest.raises(ValueError, match="SnipPruning prunes once, got scheduler = Polynomial"):
        create(config(algorithm="snip", schedule_type="polynomial", **_STEPS))


def test_srigl_drops_along_a_cosine_to_the_end():
    made = create(config(algorithm="srigl", drop_fraction=0.4, **_STEPS))
    assert [round(float(made.drop_fraction_fn(step)), 3) for step in (0, 25, 50)] == [0.4, 0.2, 0]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sr_ste", "decay", 0.1),
        ("top_kast", "backward_sparsity", 0.25),
        ("top_kast", "regularization", 0.1),
        ("admm", "rho", 0.1),
        ("srigl", "min_salient", 0.9),
    ],
)
def test_own_settings_are_keys_of_a_configuration(name, key, value):
    assert getattr(create(config(algorithm=name, **{key: value})), key) == value
