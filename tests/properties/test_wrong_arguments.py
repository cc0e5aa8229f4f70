"""Every argument of the public names and every key of a configuration refuses what means nothing.

An argument has a row in WRONG by its name, or in SPECIAL by the callable and its name. The tables
are compared with the signatures, so that a new argument needs a row.
"""

import dataclasses
import functools
import inspect
import math
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import api
from sparsity.shrinking import Small
from tests import helpers

NAN, INF = math.nan, math.inf


class Odd:
    """An object that is no argument of anything."""

    def __repr__(self):
        return "<odd>"


ODD = Odd()
OBJECTS = ([], {}, np.ones(2), ODD, "", "many")
INTEGER = (None, 1.5, NAN, INF, True, "2", *OBJECTS)
NATURAL = (-1, *INTEGER)
COUNT = (0, -1, *INTEGER)
NUMBER = (None, NAN, INF, -INF, 10**400, "0.5", 1j, True, *OBJECTS)
POSITIVE = (-1.0, *NUMBER)
FRACTION = (-0.1, 1.5, *NUMBER)
BOOLEAN = (None, 2, 0.0, NAN, "yes", *OBJECTS)
FUNCTION = (None, 3, *OBJECTS)
LOOP = (None, 3, ODD)
TREE = ({}, [], {"v": jnp.ones((8, 3))})


def optional(wrong):
    """The wrong values of an argument that may be None."""
    return tuple(value for value in wrong if value is not None)


# Wrong values by the name of the argument.
WRONG = {
    "across": (None, 2, NAN, "bytes", *OBJECTS),
    "algorithm": (None, 3, sparsity.RigL(), int, ODD),
    "apply": FUNCTION,
    "axis": INTEGER,
    "backward_sparsity": optional(FRACTION),
    "base": TREE,
    "batch_axes": NATURAL,
    "batches": (*LOOP, []),
    "block_shape": (None, 3, "22", (2,), (2, 2, 2), (0, 1), (-1, 2), (1.5, 2), (True, 2), ODD),
    "block_size": COUNT,
    "compensate": BOOLEAN,
    "count": (None, "x", ODD, [], {}, 1.5),
    "custom_sparsity_map": (3, "w", 0.5, [], {"w": 2.0}, {"w": "x"}, {"w": NAN}, {"w": 1j}),
    "damping": POSITIVE,
    "decay": POSITIVE,
    "deltas": (*LOOP, [], [3]),
    "density": (0.0, *FRACTION),
    "distribution": (3, "uniform", ODD),
    "done": (*LOOP, [3]),
    "drop_fraction_fn": (0.3, *FUNCTION),
    "dtype": (3, "x", int, "int8", complex, bool, ODD),
    "entries": optional(COUNT),
    "epoch": NATURAL,
    "evidence": (None, 3, [], ODD, {("w",): 3}, {("w",): {0: [[1]]}}),
    "filter_fn": optional(FUNCTION),
    "fn": FUNCTION,
    "group": COUNT,
    "out": (3, [], ODD),
    "formats": (3, "x", [1], ODD, {"w": "x"}, {"zz": "values"}, {"w": None}, {3: "values"}),
    "gradual": NATURAL,
    "graph": (None, 3, *OBJECTS),
    "held": (3, ODD),
    "hook": FUNCTION,
    "initial_sparsity": FRACTION,
    "inner": (3, None, ODD, "adam", {}, optax.adam),
    "is_sparse_gradients": BOOLEAN,
    "is_sparse_updates": optional(BOOLEAN),
    "iterations": NATURAL,
    "kept": (None, 3, [], ODD, {("w",): 3}),
    "kind": (None, 3, "cubes", ODD),
    "later": (None, 3, "x", [], ODD),
    "layers": (None, 3, "x", [], ODD),
    "loss": optional(FUNCTION),
    "loss_fn": FUNCTION,
    "m": COUNT,
    "macs": (0.0, *FRACTION),
    "masks": ({"zz": jnp.ones((4, 8))}, {"w": jnp.ones((2, 8)), "b": None, "v": None}),
    "metric": optional(FUNCTION),
    "min_channels": optional(COUNT),
    "min_salient": optional(FRACTION),
    "model": (None, 3, *OBJECTS),
    "n": NATURAL,
    "name": (None, 3, "", ODD, NAN, []),
    "nbytes": (0.0, *FRACTION),
    "normalization_eps": POSITIVE,
    "normalize": BOOLEAN,
    "only_total_sparsity": BOOLEAN,
    "opt_state": (None, 3, [], ODD),
    "min_inputs": optional(COUNT),
    "otherwise": (3, "x", ODD),
    "order": (0, 3, *INTEGER),
    "outside": (None, 3, "none", True, ODD),
    "param_tree": (),
    "path": (None, 3.5, ODD),
    "params": TREE,
    "pattern": (None, 3, "x", [], (2,), (0, 4), (5, 4), (1.5, 4), (True, 4), ODD),
    "plan": (3, "x", [], ODD),
    "power": (0, *POSITIVE),
    "power_scale": (1e308, *POSITIVE),
    "progress": BOOLEAN,
    "pruner": (None, 3, "wanda", sparsity.WandaPruning, ODD),
    "rate": FRACTION,
    "refit": (3, "admm", sparsity.ADMM, ODD),
    "regularization": POSITIVE,
    "rho": (-1.0, *NUMBER),
    "rewind_params": ("x", [], {}),
    "rng_seed": (1.5, NAN, True, "2", *OBJECTS),
    "round_to": COUNT,
    "rounds": (-1, *INTEGER),
    "seconds": (3, "x", [1], ODD),
    "scheduler": (None, 3, "polynomial", sparsity.OneShotSchedule, *OBJECTS),
    "schedule": (None, 3, ODD),
    "scope": (None, 3, "global", sparsity.Global, *OBJECTS),
    "donate": BOOLEAN,
    "dry_run": BOOLEAN,
    "sequential": BOOLEAN,
    "row_weights": (3, "many", np.full(2, -1.0), np.ones(77), lambda batch: 3),
    "blocks": (3, "many", ODD),
    "shapes": (None, 3, [], ODD, {("w",): 3}, {("w",): "ab"}),
    "skip_gradients": BOOLEAN,
    "sparse_state": (None, 3, [], ODD),
    "sparsity": FRACTION,
    "sparsity_distribution_fn": (3, "uniform", 0.5, *OBJECTS),
    "sparsity_type": (None, 3, "nm_2,4", sparsity.Unstructured, *OBJECTS),
    "spread": POSITIVE,
    "state": (3, "x", [1], ODD, {"w": "zz"}, {3: 4}),
    "statistics": (None, 3, [], ODD),
    "steps_per_epoch": COUNT,
    "store_masks": BOOLEAN,
    "straight_through": BOOLEAN,
    "strategy": (None, 3, "nm", *OBJECTS),
    "swap": NATURAL,
    "target_step": (2**31, *NATURAL),
    "threshold": POSITIVE,
    "topk_fn": optional(FUNCTION),
    "train_fn": FUNCTION,
    "tx": (3, "x", optax.adam, ODD),
    "update_end_step": optional((2**31, *NATURAL)),
    "update_freq": (2**31, *COUNT),
    "update_start_step": (2**31, *NATURAL),
    "updater": (None, 3, "x", ODD),
    "by": (None, 3, "size", ODD),
    "groups": (3, "nothing", ["nothing"], [3], ODD),
    "importance": (3, "x", {"nothing": np.ones(8)}, {"w:1": np.ones(7)}, {3: np.ones(8)}, ODD),
    "keys": (3, "nothing", ["nothing"], [3], ODD),
    "rates": (3, "x", {"hidden": 2.0}, {"nothing": 0.5}, {3: 0.5}, ODD),
    "use_avg_pooling": BOOLEAN,
    "use_compact_state": BOOLEAN,
    "use_normalization": BOOLEAN,
    "use_packed_masks": BOOLEAN,
    "weights": (3, ODD, [1], [1, NAN], [1, "x"]),
    "x": (None, "x", {}, ODD),
}
SPECIAL = {
    ("ADMMPruning", "rho"): optional(POSITIVE),
    ("ERK", "batch_axes"): (1.5, NAN, INF, True, "2", *OBJECTS),
    ("ERK", "sparsity"): optional(FRACTION),
    ("Graph.is_weight", "path"): (),  # called by the library
    ("Graph.is_weight", "param"): (),
    ("Graph.retrace", "params"): (),
    ("Graph.retrace", "args"): (),
    ("Graph.plot", "ax"): (3, ODD),
    ("Compact.apply", "args"): (),  # of the model
    ("Compact.dense_state", "opt_state"): (),  # any tree
    ("Compact.move", "opt_state"): (),
    ("Compact.tune", "opt_state"): (),
    ("Compact.measure", "args"): (),
    ("Compact.measure", "rounds"): COUNT,
    ("Compact.plot", "ax"): (3, ODD),
    ("Compact.tune", "args"): (),
    ("Compact.tune", "rounds"): COUNT,
    ("Plan.apply", "args"): (),
    ("Small.apply", "args"): (),
    ("Small.macs", "path"): (3, "w", ("zz",), ODD),
    ("Small.measure", "args"): (),
    ("Small.measure", "rounds"): COUNT,
    ("Small.plot", "axes"): (),  # of matplotlib
    ("FanIn", "axis"): (None, 1.5, NAN, True, "2", (), (0, 0), (0, None), ODD),
    ("GlobalMagnitudePruning", "sparsity"): optional(FRACTION),
    ("GlobalSaliencyPruning", "sparsity"): optional(FRACTION),
    ("Plan.from_json", "text"): (None, 3, "", "[]", "{}", [], ODD, b"x"),
    ("Uniform", "batch_axes"): (1.5, NAN, INF, True, "2", *OBJECTS),
    ("Uniform", "sparsity"): optional(FRACTION),
    ("calibrate", "params"): (),  # what the model says of them, see `trace`
    ("compact", "opt_state"): (),  # a state may be any tree
    ("compact", "params"): (None, 3, {}, []),
    ("create_updater_from_config", "config"): (),  # see CONFIG
    ("lottery_ticket", "params"): (),  # any tree
    ("merge_lora", "lora"): ({"zz": (jnp.ones((4, 2)), jnp.ones((2, 8)))}, {"w": 3}),
    ("merge_lora", "masks"): ({"zz": jnp.ones((4, 8))}, {}),
    ("merge_lora", "params"): TREE,
    ("merge_lora", "scale"): (),  # may be traced
    ("oneshot", "params"): (),
    ("BlockRefit", "steps"): COUNT,
    ("BlockRefit", "learning_rate"): (-1, *NUMBER),
    ("BlockRefit", "rows"): optional(COUNT),
    ("BlockRefit", "window"): COUNT,
    ("BlockRefit", "inputs"): (None, 3, "both", ODD),
    ("BlockRefit", "held"): (-0.1, 1.0, *NUMBER),
    ("BlockRefit", "optimizer"): (3, "adam", ODD),
    ("owl", "params"): TREE,
    ("prune_at_init", "fn"): (),  # another score's
    ("prune_at_init", "inputs"): (),
    ("prune_at_init", "name"): (None, 3, "zz", [], ODD),
    ("prune_at_init", "params"): (),
    ("prune_at_init", "rounds"): (),  # of synflow
    ("register_schedule", "schedule"): (
        None,
        3,
        ODD,
        int,
        sparsity.Uniform,
        sparsity.OneShotSchedule(0),
    ),
    ("register_scope", "scope"): (None, 3, ODD, int, sparsity.Global(), sparsity.Uniform),
    ("sharding_like", "opt_state"): (),  # any tree
    ("sharding_like", "params"): (None, 3, {}, [], {"w": np.ones(3)}),
    ("shrink", "opt_state"): (),
    ("shrink", "params"): (),  # a part of the tree
    ("snip_scores", "params"): (),
    ("check", "params"): TREE,
    ("sparsity_table", "params"): TREE,
    ("trace", "args"): (),  # of the model
    ("trace", "params"): (),
    ("unpack_masks", "params"): TREE,
}
# Names that are not called with arguments of a user, and why.
EXEMPT = {
    "ALGORITHM_REGISTRY": "a dict",
    "BaseUpdater": "abstract",
    "Distribution": "a protocol",
    "EpochStrategy": "tests/epochs/test_faulty_strategies.py",
    "Graph": "made by trace",
    "Schedule": "a protocol",
    "Scope": "a protocol",
    "SparseState": "a NamedTuple of trees",
    "SparsityType": "abstract",
    "Statistic": "a pytree, checked where it meets its leaf",
    "pruning": "tests/epochs/test_faulty_strategies.py",
    "pruning_apply": "tests/epochs/test_faulty_strategies.py",
}
# What messages call arguments that are trees.
CALLED = {
    "masks": "mask",
    "opt_state": "state",
    "params": "params",
    "rewind_params": "rewind_params",
    "text": "plan",
}
NAMES = [name for name in sparsity.__all__ if name not in EXEMPT]
EXTRA = {
    "Plan.from_json": sparsity.Plan.from_json,
    "wrap_optax": sparsity.MagnitudePruning().wrap_optax,
}
# All methods, by their signatures; those of an instance get one of `world`.
EXTRA |= {
    f"{kind.__name__}.{name}": getattr(kind, name)
    for kind in (sparsity.Delta, sparsity.Graph, sparsity.compacting.Compact, sparsity.Plan, Small)
    for name, method in vars(kind).items()
    if not name.startswith("_") and isinstance(method, FunctionType | staticmethod | classmethod)
}
# A method for the package itself.
del EXTRA["Plan.shrink_shape"]
half = sparsity.Uniform(0.5)


def model(params, x):
    return jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]


@functools.cache
def world():
    """Valid arguments by name."""
    params = {"w": helpers.normal(4, 8), "b": np.zeros(8, np.float32), "v": helpers.normal(8, 3)}
    params = jax.tree.map(jnp.asarray, params)
    x = jnp.ones((5, 4))
    graph = sparsity.trace(model, params, x)
    masks = {"w": jnp.ones((4, 8), jnp.uint8), "b": None, "v": None}
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=half, scheduler=sparsity.OneShotSchedule(0)
    )
    opt_state = updater.wrap_optax(optax.adam(0.1)).init(params)
    delta = sparsity.Delta.between(params, params | {"w": params["w"] + 1})
    return {
        "params": params, "x": x, "graph": graph, "masks": masks, "updater": updater,
        "opt_state": opt_state, "sparse_state": opt_state, "fn": model, "batches": [x], "keys": (),
        "tx": optax.adam(0.1), "inner": optax.adam(0.1), "apply": lambda v, x: x, "name": "test",
        "loss_fn": lambda params, x: jnp.sum(model(params, x) ** 2), "deltas": [delta, delta],
        "pruner": sparsity.WandaPruning(sparsity_distribution_fn=half), "hook": lambda self: self,
        "statistics": sparsity.calibrate(model, params, [x]), "layers": {"a": (1, 2)},
        "base": params, "param_tree": params, "pattern": (1, 2), "density": 0.5, "rounds": 1,
        "train_fn": lambda params, masks: params, "update_freq": 1, "update_end_step": 9,
        "target_step": 0, "block_shape": (2, 2), "n": 1, "m": 2, "text": "{}", "power": 3,
        "count": 0, "later": None,
        "kept": {("w",): {1: np.array([0])}}, "shapes": {("w",): (4, 8)}, "sparsity": 0.5,
        "algorithm": sparsity.RigL, "distribution": sparsity.ERK, "schedule":
        sparsity.OneShotSchedule, "scope": sparsity.Global, "lora": {"w": None},
    }  # fmt: skip


@functools.cache
def instances():
    """Objects with the methods of EXTRA, by the names of their classes."""
    params, graph, masks = (world()[name] for name in ("params", "graph", "masks"))
    small = sparsity.shrink(graph, params, masks)
    return {
        "Delta": world()["deltas"][0],
        "Graph": graph,
        "Compact": sparsity.compact(graph, params, masks),
        "Plan": small.plan,
        "Small": small,
    }


# Arguments whose wrong values Python or numpy refuse in clear words of their own.
PLAIN = {
    *(("Delta.merge", name) for name in ("deltas", "weights")),
    *((f"prune_act_{kind}", "x") for kind in ("struct", "unstruct")),
    *(("Delta.load", "path"), ("Delta.save", "path"), ("Delta.between", "dtype")),
}


def bind(function):
    """Returns a method of an instance bound to that of `world`; other functions as they are."""
    if "self" not in inspect.signature(function).parameters:
        return function
    return getattr(instances()[function.__qualname__.split(".")[0]], function.__name__)


def call(name, argument, value):
    """Calls a public name with valid arguments but one; updaters and scopes are used, too."""
    function = bind(EXTRA.get(name) or getattr(sparsity, name))
    parameters = inspect.signature(function).parameters
    needed = {
        n for n, p in parameters.items() if p.default is p.empty and p.kind != p.VAR_POSITIONAL
    }
    arguments = {n: world()[n] for n in needed if n != argument} | {argument: value}
    if name in ("Uniform", "ERK"):
        arguments = {"sparsity": None if argument == "entries" else 0.5} | arguments
        return function(**arguments)(world()["params"])
    if name == "budget" and argument != "nbytes":
        arguments = {"macs": 0.5} | arguments
    if name == "PolynomialSchedule":
        arguments = {"update_end_step": 9} | arguments
    if name in ("FLAPPruning", "OSSCARPruning"):
        arguments = {"scope": sparsity.Coupled(world()["graph"])} | arguments
    if name == "prune_at_init":
        arguments |= (
            {"name": "snip"} | {n: world()[n] for n in ("loss_fn", "batches")} | {argument: value}
        )
    if name == "rank_groups":
        valid = {"by": "taylor"} | {n: world()[n] for n in ("loss_fn", "batches")}
        arguments |= valid | {argument: value}
    if name in ("compact", "shrink") and argument == "tx":
        arguments["opt_state"] = optax.adam(0.1).init(world()["params"])
    if name.startswith("Compact."):
        valid = {"params": instances()["Compact"].params, "count": 0}
        arguments |= {key: valid[key] for key in parameters.keys() & valid.keys() - {argument}}
    if name in ("Compact.measure", "Compact.tune", "Small.measure"):
        function = functools.partial(function, arguments.pop("params"), world()["x"])
    if name == "trace":
        fixed = [arguments.pop("fn"), arguments.pop("params"), world()["x"]]
        return function(*fixed, **arguments)
    result = function(**arguments)
    if name == "wrap_optax":
        result.init(world()["params"])
    elif name == "train_only":
        result.update(world()["params"], result.init(world()["params"]), world()["params"])
    return result


def refusal(name, argument, value):
    """Returns the message of the error of a call with one wrong value."""
    try:
        call(name, argument, value)
    except (ValueError, TypeError) as error:
        return str(error)
    return pytest.fail(f"{name}({argument}={value!r}) is accepted")


def rows(name):
    """Yields the arguments of a public name with their wrong values."""
    function = EXTRA.get(name) or getattr(sparsity, name)
    for argument in inspect.signature(function).parameters.keys() - {"self"}:
        key = name, argument
        yield argument, SPECIAL[key] if key in SPECIAL else WRONG[argument]


@pytest.mark.parametrize("name", [*NAMES, *EXTRA])
def test_every_argument_has_a_row(name):
    if name not in ("Delta", "all_algorithm_names"):
        assert all(isinstance(wrong, tuple) for _, wrong in rows(name))


def test_a_new_argument_without_a_row_is_noticed(monkeypatch):
    def plan(kept, shapes, new=None): ...

    monkeypatch.setattr(sparsity, "Plan", plan)
    with pytest.raises(KeyError, match="new"):
        test_every_argument_has_a_row("Plan")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [n for n in [*NAMES, *EXTRA] if n not in ("Delta", "all_algorithm_names")]
)
def test_a_wrong_value_is_refused_by_the_name_of_its_argument(name):
    for argument, wrong in rows(name):
        if name.startswith("sparsify_nnx") and argument != "model":
            continue
        for value in wrong:
            message = refusal(name, argument, value)
            if (name, argument) in PLAIN:
                continue
            assert CALLED.get(argument, argument) in message, (argument, value, message)
            if argument not in CALLED and isinstance(value, bool | int | float | str | complex):
                shown = repr(value), str(value)
                assert any(text in message for text in shown), (argument, value, message)


# Keys of configurations; None stands for a missing key.


def list_keys(algorithm):
    """Keys that a configuration of an algorithm takes, without the choices of names."""
    fields = {*api._list_field_names(sparsity.ALGORITHM_REGISTRY[algorithm])}
    tables = api.DISTRIBUTIONS, api.SCHEDULES
    keys = fields.union(*(api._read_keys(x) for table in tables for x in table.values()))
    keys |= {*sparsity.ALGORITHM_REGISTRY[algorithm].config_keys}
    if sparsity.ALGORITHM_REGISTRY[algorithm].schedule_type != "polynomial":
        keys -= {"power", "initial_sparsity"}  # ignored, which is logged
    if algorithm.startswith("global"):
        keys.remove("erk_power_scale")
    if "scope" in fields:
        keys = keys.union(*map(api._read_keys, api.SCOPES.values()))
    return keys


CONFIG = {
    "config": {"algorithm": "magnitude", "sparsity": 0.5},
    "drop_fraction": FRACTION,
    "erk_power_scale": POSITIVE,
    "filter_fn": FUNCTION,
    "scope": (3, [], {}, "many", sparsity.Global, ODD),
    "sparsity_type": (3, sparsity.NByM, ODD),
}


# All keys that any algorithm takes.
ALGORITHMS = ("magnitude", "rigl", "global_magnitude", "srigl", "admm", "sr_ste", "top_kast")


@pytest.mark.parametrize("algorithm", sparsity.all_algorithm_names())
def test_every_key_of_a_configuration_has_a_row(algorithm):
    keys = list_keys(algorithm)
    assert all(isinstance(CONFIG.get(key) or WRONG[key], tuple) for key in keys)
    assert keys <= set.union(*map(list_keys, ALGORITHMS))


def test_a_new_key_without_a_row_is_noticed(registry):
    @dataclasses.dataclass
    class New(sparsity.MagnitudePruning):
        new: int = 0

    registry["new"] = New
    with pytest.raises(KeyError, match="new"):
        test_every_key_of_a_configuration_has_a_row("new")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wrong_value_of_a_configuration_is_refused_by_its_key(algorithm):
    for key in sorted(list_keys(algorithm)):
        config = {"algorithm": algorithm, "sparsity": 0.5, "dist_type": "erk"}
        if key in ("power", "initial_sparsity", "update_freq") or key.startswith("update"):
            ramp = {"update_freq": 2, "update_start_step": 1, "update_end_step": 9}
            config |= ramp | {"schedule_type": "polynomial"}
        if key in ("use_normalization", "normalization_eps") and algorithm != "global_magnitude":
            config["scope"] = "global"
        if algorithm == "global_magnitude":
            del config["dist_type"]
        for value in CONFIG.get(key) or WRONG[key]:
            if value is None:
                continue
            with pytest.raises((ValueError, TypeError), match=key):
                sparsity.create_updater_from_config(config | {key: value})


# Results of functions that a user gives.


@pytest.mark.parametrize("axes", [None, "1", 1.0, True, -1, 9])
def test_a_number_of_batch_axes_that_a_function_returns_is_checked(axes):
    for pruner in (
        sparsity.MagnitudePruning(
            batch_axes=lambda path, param: axes, sparsity_distribution_fn=half
        ),
        sparsity.MagnitudePruning(
            sparsity_distribution_fn=sparsity.Uniform(0.5, batch_axes=lambda path, param: axes)
        ),
    ):
        with pytest.raises(ValueError, match=f"batch_axes.*{axes}"):
            pruner.instant_sparsify(world()["params"])


@pytest.mark.parametrize("mask", [None, np.ones(3)], ids=["None", "another shape"])
def test_a_mask_that_topk_fn_returns_is_checked(mask):
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=half, topk_fn=lambda scores, sparsity: mask
    )
    with pytest.raises(ValueError, match=r"the mask of topk_fn = .* must"):
        pruner.instant_sparsify(world()["params"])


@pytest.mark.parametrize("number", [None, "a", -1.0, NAN])
def test_a_penalty_that_rho_returns_is_checked(number):
    schedule = sparsity.OneShotSchedule(2)
    pruner = functools.partial(
        sparsity.ADMMPruning, sparsity_distribution_fn=half, scheduler=schedule
    )
    with pytest.raises(ValueError, match=r"rho\(0\) must be a finite number"):
        pruner(rho=lambda step: number).wrap_optax(optax.sgd(1.0)).init(world()["params"])


def test_a_metric_must_return_a_number():
    arguments = [world()[name] for name in ("pruner", "fn", "params", "batches")]
    with pytest.raises(
        ValueError, match=r"metric must return a number, got metric\(params\) = 'a'"
    ):
        sparsity.oneshot(*arguments, metric=lambda params: "a")
