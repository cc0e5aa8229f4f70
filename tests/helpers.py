"""What many test modules share: parameters, distributions, a training loop, oracles of counts."""

import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import subprocess
import sys
from fractions import Fraction
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms import global_pruners, sparse_trainers, ste
from sparsity.programs.program import read_jaxpr

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Compiles programs as before the emitters of fusions, the only ones since jax 0.11.
WITHOUT_EMITTERS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
# For programs that take longer to run than to compile; see `tests/environment.py`.
OPTIMIZED = {"xla_backend_optimization_level": 1}
SHAPE = (6, 10)  # of the kernel that `params` makes
# For tests of what only XLA:CPU does, or numpy in its place. A text is read when a test starts:
# programs that import this module still choose their devices.
ON_CPU = pytest.mark.skipif("__import__('jax').default_backend() != 'cpu'")


_COUNTS: list[list[int]] = []


def _count_program(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
        for count in _COUNTS:
            count[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count_program)


@contextlib.contextmanager
def counted_programs():
    """Yields a list whose entry is the number of programs that were compiled in the context."""
    count = [0]
    _COUNTS.append(count)
    try:
        yield count
    finally:
        _COUNTS.remove(count)


def list_scatters(fn, *args):
    """Returns the equations of a program, loops included, that write at positions."""
    programs = read_jaxpr(jax.make_jaxpr(fn)(*args)).nested_programs()
    equations = (equation for program in programs for equation in program.flat_equations())
    return [equation for equation in equations if equation.name.startswith("scatter")]


@contextlib.contextmanager
def checking_leaks():
    """Looks for tracers that leak; collections of garbage pass over objects of earlier tests."""
    gc.freeze()
    with jax.checking_leaks():
        yield


def slow_but(quick, cases):
    """Cases of a test by name, of which only those in `quick` are not slow."""
    return [pytest.param(x, marks=[] if x in quick else pytest.mark.slow) for x in cases]


# Containers of parameters.


class Pair(NamedTuple):
    kernel: object
    bias: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object


class Module(eqx.Module):
    kernel: object
    bias: object


# Values.


def params(seed=0, shape=SHAPE, dtype=jnp.float32):
    """A kernel and a bias, drawn from a normal distribution."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=shape), dtype),
        "bias": jnp.asarray(rng.normal(size=shape[-1:]), dtype),
    }


def grads(step):
    """Gradients of `params`, others at each step."""
    return params(1000 + step)


def start_module(name, *arguments):
    """Starts a module in a process group of its own, so that a kill takes its children too."""
    return subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def normal(*shape, dtype=np.float32, seed=0):
    """Values with signs, ties and zeros."""
    return np.round(np.random.default_rng(seed).normal(size=shape), 1).astype(dtype)


def arrays(*shapes):
    """Shapes and dtypes of parameters."""
    return {f"p{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}


# Algorithms, by what their classes say.


def prunes(name):
    """Whether the algorithm removes weights at all."""
    return not issubclass(sparsity.ALGORITHM_REGISTRY[name], sparsity.NoPruning)


def is_straight_through(name):
    """Whether the algorithm keeps the weights dense, and masks what the model sees."""
    return issubclass(sparsity.ALGORITHM_REGISTRY[name], ste.StraightThrough)


def ranks_all_layers(name):
    """Whether one threshold holds for all layers."""
    return isinstance(sparsity.ALGORITHM_REGISTRY[name]().scope, sparsity.Global)


def takes_a_distribution(name):
    """Whether a field says how sparse each layer becomes."""
    return not issubclass(sparsity.ALGORITHM_REGISTRY[name], global_pruners.GlobalPruning)


def takes_types(name):
    """Whether masks may follow any pattern."""
    return not ranks_all_layers(name) and not has_constant_fan_in(name)


def has_constant_fan_in(name):
    """Whether all neurons that stay have as many weights."""
    return issubclass(sparsity.ALGORITHM_REGISTRY[name], sparsity.SRigL)


def starts_dense(name):
    """Whether masks are ones until the first update of a schedule."""
    default = sparsity.BaseUpdater.get_initial_masks, ste.StraightThrough.get_initial_masks
    return sparsity.ALGORITHM_REGISTRY[name].get_initial_masks in default


def prunes_at_once(name):
    """Whether `instant_sparsify` is there."""
    return not is_sparse_training(name)


def is_sparse_training(name):
    """Whether training starts from masks that are drawn."""
    return issubclass(sparsity.ALGORITHM_REGISTRY[name], sparse_trainers.SparseTraining)


def draws_masks(name):
    """Whether masks depend on the seed."""
    algorithm = sparsity.ALGORITHM_REGISTRY[name]
    return is_sparse_training(name) or issubclass(algorithm, sparsity.RandomPruning)


def list_names(*properties):
    """Names of the registered algorithms that have all the properties."""
    return [n for n in sparsity.all_algorithm_names() if all(has(n) for has in properties)]


# Updaters.


def uniform(value, **options):
    """A uniform distribution, as the field of an updater."""
    return functools.partial(sparsity.sparsity_distributions.uniform, sparsity=value, **options)


half = uniform(0.5)


def make_updater(name, **options):
    """An updater from a configuration: 75% in the end, masks updated at steps 1 and 3."""
    config = {
        "algorithm": name,
        "sparsity": 0.75,
        "update_freq": 2,
        "update_start_step": 1,
        "update_end_step": 3,
    }
    return sparsity.create_updater_from_config(config | options)


def train(updater, params, steps, optimizer=None, *, post=False, grads=grads, jit=True):
    """Trains for some steps; returns parameters and optimizer state."""
    tx = updater.wrap_optax(optax.adamw(0.1, weight_decay=0.05) if optimizer is None else optimizer)
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for step in range(steps):
        updates, state = update(grads(step), state, params)
        params = optax.apply_updates(params, updates)
        if post:
            params = updater.post_gradient_update(params, state)
    return params, state


# Oracles.


def num_kept(n, sparsity_):
    """round_half_even(n * (1 - float32(sparsity))), at least one of any, in exact arithmetic."""
    return min(n, max(1, round(n * (1 - Fraction(float(np.float32(sparsity_)))))))


def bits(tree):
    """The tree with (shape, dtype, bytes) for arrays."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()), tree)


def is_positive_zero(array):
    """Where all bits are zero."""
    array = np.asarray(array)
    return array.view(f"uint{8 * array.itemsize}") == 0
