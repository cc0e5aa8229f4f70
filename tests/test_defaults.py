"""Defaults of public arguments, as they were released, and options of dataclasses.

A default that changes is a change for users: it belongs here, in the docstring and the changelog.
"""

import dataclasses
import importlib
import inspect
import pkgutil

import sparsity
from sparsity.compacting.compact import Compact
from sparsity.shrinking.shrink import Small
from sparsity.training.base_updater import BaseUpdater

# Of the arguments that all updaters share.
UPDATER = {
    "skip_gradients": False,
    "is_sparse_gradients": False,
    "rng_seed": 8,
    "use_packed_masks": False,
    "batch_axes": 0,
    "use_compact_state": False,
}
# All others, with those in which an updater differs.
DEFAULTS = """
ACDC(is_sparse_gradients=True)
ADMM(iterations=20, gradual=0, rho=1.0, damping=0.1)
Block(use_avg_pooling=True)
Block.check(batch_axes=0, name='params')
Block.count_kept(batch_axes=0)
Block.expand(batch_axes=0)
Block.pool(batch_axes=0)
BlockRefit(steps=32, learning_rate=0.001, rows=1, window=1, inputs='pruned', held=0.125)
Channel(axis=-1)
Channel.check(batch_axes=0, name='params')
Channel.count_kept(batch_axes=0)
Channel.expand(batch_axes=0)
Channel.pool(batch_axes=0)
Compact.measure(rounds=10)
Compact.tune(rounds=10)
Coupled(order=1, normalize=False, across=False, round_to=1)
ERK(power_scale=1.0)
FLAPPruning(compensate=True)
FanIn(group=1, axis=-2)
FanIn.check(batch_axes=0, name='params')
FanIn.count_kept(batch_axes=0)
FanIn.expand(batch_axes=0)
FanIn.pool(batch_axes=0)
Global(use_normalization=True, normalization_eps=1e-08)
GlobalMagnitudePruning(sparsity=0.0, use_normalization=True, normalization_eps=1e-08)
GlobalRigL(skip_gradients=True, is_sparse_gradients=True)
GlobalSaliencyPruning(sparsity=0.0, use_normalization=True, normalization_eps=1e-08)
Graph.fan_in(group=1)
NByM(axis=-1)
NByM.check(batch_axes=0, name='params')
NByM.count_kept(batch_axes=0)
NByM.move(batch_axes=0)
NByM.select(batch_axes=0)
OSSCARPruning(swap=8, damping=0.01)
PeriodicSchedule(update_start_step=0)
PolynomialSchedule(update_start_step=0, power=3, initial_sparsity=0.0)
RigL(skip_gradients=True, is_sparse_gradients=True)
SET(skip_gradients=True, is_sparse_gradients=True)
SRSTE(store_masks=False, decay=0.0002)
SRigL(skip_gradients=True, is_sparse_gradients=True, min_salient=0.3)
Small.measure(rounds=20)
SparseGPTPruning(block_size=128, damping=0.01)
SparsityType.check(batch_axes=0, name='params')
SparsityType.count_kept(batch_axes=0)
SparsityType.expand(batch_axes=0)
SparsityType.move(batch_axes=0)
SparsityType.pool(batch_axes=0)
SparsityType.select(batch_axes=0)
StaticRandomSparse(is_sparse_gradients=True)
Statistic(batch=(), groups=1)
SteMagnitudePruning(store_masks=False)
SteRandomPruning(store_masks=False)
TopKast(regularization=0.0001)
Unstructured.count_kept(batch_axes=0)
calibrate(kind='squares', progress=False)
compact(outside='zero')
lottery_ticket(rate=0.2, done=())
merge_lora(scale=1.0)
oneshot(sequential=True, donate=False, progress=False, dry_run=False)
owl(sparsity=0.6, threshold=5.0, spread=0.08)
prune_act_struct(axis=-1, straight_through=False)
prune_act_unstruct(batch_axes=0, straight_through=False)
prune_at_init(rounds=100)
rank_groups(batches=(), by='flap')
sparsify_linen(batch_axes=0, straight_through=False)
sparsify_nnx(batch_axes=0, straight_through=False)
summarize_sparsity(only_total_sparsity=False)
"""
# Dataclasses that compare as any object.
IDENTITY = """
Alignment Axis Candidates ChannelGroup Compact Deferred Delta Equation
Frame KeptArray KeptParameter Lane LayerStack Model
Program Run Small StoredParameter Use
Value Walk Width _CutParameter _SlotMap _Trainer
"""


def list_callables():
    """Yields the public functions and classes, and the methods of classes, with their names."""
    for name in sparsity.__all__:
        member = getattr(sparsity, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            yield name, member
    public = [getattr(sparsity, name) for name in sparsity.__all__]
    for kind in dict.fromkeys(x for x in (*public, Compact, Small) if inspect.isclass(x)):
        for name, method in vars(kind).items():
            function = getattr(method, "__func__", method)  # of a class method
            if not name.startswith("_") and inspect.isfunction(function):
                yield f"{kind.__name__}.{name}", function


def write_defaults(name, function):
    """Returns the defaults of a function as a call, '' without any."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a class that inherits from a builtin
        return ""
    defaults = {
        key: parameter.default
        for key, parameter in parameters.items()
        if isinstance(parameter.default, bool | int | float | str | tuple)
    }
    if defaults.keys() >= UPDATER.keys():
        defaults = {k: x for k, x in defaults.items() if k not in UPDATER or x != UPDATER[k]}
    shown = ", ".join(f"{key}={default!r}" for key, default in defaults.items())
    return shown and f"{name}({shown})"


def test_defaults_are_those_that_were_released():
    written = [write_defaults(name, function) for name, function in list_callables()]
    assert sorted(filter(None, written)) == sorted(DEFAULTS.split("\n")[1:-1])


def list_dataclasses():
    """Returns the dataclasses of the package."""
    names = [module.name for module in pkgutil.walk_packages(sparsity.__path__, "sparsity.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    kinds = (
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and kind.__module__ == module.__name__
        and dataclasses.is_dataclass(kind)
    )
    return list(dict.fromkeys(kinds))  # a class may have an alias, as `Axis` has


def test_dataclasses_are_frozen_but_updaters_and_parts_of_programs():
    kinds = [kind for kind in list_dataclasses() if not kind.__dataclass_params__.frozen]
    names = {kind.__name__ for kind in kinds if not issubclass(kind, BaseUpdater)}
    expected = {"Axis", "ComparedByFields", "Equation", "Program", "UpdaterHooks", "Value"}
    assert names == {*expected, "Walk", "Run"}


def test_objects_that_hold_arrays_or_programs_equal_themselves_alone():
    kinds = [kind for kind in list_dataclasses() if kind.__eq__ is object.__eq__]
    assert sorted(kind.__name__ for kind in kinds) == IDENTITY.split()
