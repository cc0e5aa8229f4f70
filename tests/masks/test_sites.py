"""Functions of (path, param) see parameters, and batch axes are said once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.masks import Sites
from sparsity.sparsity_distributions import erk, uniform
from tests import helpers

_SHAPES = {"half": (4, 8), "full": (2, 8), "bias": (8,)}
_DTYPES = {"half": jnp.bfloat16, "full": jnp.float32, "bias": jnp.bfloat16}
_NAMES = [name for name in sparsity.all_algorithm_names() if name != "no_prune"]
# Those with a structure of their own never ask for a type.
algorithms = pytest.mark.parametrize(
    "name", [name for name in _NAMES if not helpers.has_constant_fan_in(name)]
)


def _params():
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape), _DTYPES[name]) for name, shape in _SHAPES.items()
    }


def _grads():
    """Gradients of other dtypes than their parameters have."""
    other = {jnp.bfloat16: jnp.float32, jnp.float32: jnp.bfloat16}
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.normal(size=shape), other[_DTYPES[name]])
        for name, shape in _SHAPES.items()
    }


class Asked:
    """A function of (path, param) that remembers what it was asked about."""

    def __init__(self, answer):
        self.answer, self.seen = answer, {}

    def __call__(self, path, param):
        self.seen.setdefault("/".join(path), []).append(param)
        return self.answer(path, param)

    def check(self, names):
        """Every call was about a parameter as it is, and there were calls since the last check."""
        assert self.seen.keys() == set(names)
        for name, params in self.seen.items():
            for param in params:
                assert (param.shape, param.dtype) == (_SHAPES[name], _DTYPES[name])
        seen, self.seen = self.seen, {}
        return seen


def _runs(name, **options):
    """Yields after init, a jitted update that refreshes, and instant_sparsify."""
    schedule = {"update_freq": 2, "update_start_step": 0, "update_end_step": 4}
    config = {"algorithm": name, "sparsity": 0.5, **schedule, **options}
    if name.endswith("_ste"):
        config["store_masks"] = True
    if name == "snip":  # which updates its masks at the start only
        config["update_start_step"] = 4
    updater = sparsity.create_updater_from_config(config)
    tx = updater.wrap_optax(optax.sgd(0.1))
    params, grads = _params(), _grads()
    state = tx.init(params)
    yield "init", params, state.masks
    if name != "static_sparse":  # which never refreshes its masks
        _, state = jax.jit(tx.update)(grads, state._replace(count=jnp.int32(4)), params)
        yield "update", params, state.masks
    if helpers.prunes_at_once(name):
        yield "instant", params, updater.instant_sparsify(params, grads)[1]


@pytest.mark.slow
@algorithms
def test_functions_are_asked_about_parameters_and_never_about_anything_else(name):
    is_global = helpers.ranks_all_layers(name)

    def group(path, param):
        is_half = param.dtype == jnp.bfloat16 and not is_global
        return sparsity.NByM(2, 4) if is_half else sparsity.Unstructured()

    kinds = Asked(group)
    axes = Asked(lambda path, param: 0 if is_global or param.ndim < 2 else 1)
    chosen = Asked(lambda path, param: path[-1] != "bias")
    for at, params, masks in _runs(name, sparsity_type=kinds, batch_axes=axes, filter_fn=chosen):
        # A distribution needs batch axes of all leaves; the type of dense leaves is never asked.
        asked = [kinds.check(["half", "full"])]
        if at == "update":  # which is traced
            axes.check(["half", "full"])
            assert not chosen.seen
        else:
            asked += [axes.check(_SHAPES), chosen.check(_SHAPES)]
            for seen in asked:
                assert all(
                    param is params[leaf] for leaf, actual in seen.items() for param in actual
                )
        if (at != "init" or not helpers.starts_dense(name)) and not is_global:
            assert np.all(np.asarray(masks["half"]).reshape(-1, 4).sum(axis=1) == 2)
            assert np.all(np.asarray(masks["full"]).sum(axis=1) == 4)  # each row by itself
        assert masks["bias"] is None


def test_leaves_that_a_map_keeps_dense_are_not_asked_for_their_type():
    asked = Asked(lambda path, param: sparsity.NByM(3, 8))  # does not fit (4, 6)
    params = {"a": jnp.ones((4, 8)), "b": jnp.ones((4, 6)), "c": jnp.ones(5)}
    pruner = sparsity.MagnitudePruning(
        sparsity_type=asked,
        sparsity_distribution_fn=sparsity.Uniform(0.5, custom_sparsity_map={"b": None}),
    )
    _, masks = pruner.instant_sparsify(params)
    assert asked.seen.keys() == {"a"}
    assert (masks["b"], masks["c"]) == (None, None)


def test_straight_through_asks_about_parameters_in_the_forward_pass():
    asked = Asked(lambda path, param: sparsity.NByM(1, 4))
    pruner = sparsity.SteMagnitudePruning(
        sparsity_type=asked, sparsity_distribution_fn=sparsity.Uniform(0.75)
    )
    params = _params()
    state = pruner.wrap_optax(optax.sgd(0.1)).init(params)
    asked.check(["half", "full"])
    seen = jax.jit(pruner.pre_forward_update)(params, state)
    asked.check(["half", "full"])
    assert np.all(np.count_nonzero(np.asarray(seen["full"]).reshape(-1, 4), axis=1) == 1)


def test_a_site_is_resolved_once_and_says_what_it_is():
    asked = Asked(lambda path, param: sparsity.Unstructured())
    params = {"a": {"w": jnp.ones((2, 3))}, "n": jnp.zeros(3, jnp.int32), "k": jax.random.key(0)}
    table = Sites(params, asked, 1, {"a/.*": 0.5})
    (path,) = table  # integers and keys have no site
    assert table[path] is table[path]
    assert (table[path].name, table[path].batch_axes) == ("a/w", 1)
    assert table[path].has_override
    assert len(asked.seen["a/w"]) == 1
    assert not Sites(params, asked, 1, {"b": 0.5})[path].has_override


def test_a_type_that_is_none_is_an_error_with_the_leaf():
    pruner = sparsity.MagnitudePruning(
        sparsity_type=lambda path, param: "2:4", sparsity_distribution_fn=sparsity.Uniform(0.5)
    )
    with pytest.raises(ValueError, match=r"sparsity_type of 'a/w' must be .* '2:4'"):
        pruner.instant_sparsify({"a": {"w": jnp.ones((2, 4))}})


@pytest.mark.parametrize("axes", [-1, 3])
def test_batch_axes_out_of_range_are_an_error_with_the_leaf(axes):
    pruner = sparsity.MagnitudePruning(
        batch_axes=lambda path, param: axes, sparsity_distribution_fn=sparsity.Uniform(0.5)
    )
    with pytest.raises(ValueError, match=f"batch_axes of 'a/w' must be at .* = {axes}"):
        pruner.instant_sparsify({"a": {"w": jnp.ones((2, 4))}})


# The batch axes of an updater and its distribution.

_STACK = {"kernel": jnp.ones((2, 4, 6)), "bias": jnp.ones((2, 6))}


def _select_matrices(params, batch_axes=0):
    return jax.tree.map(lambda p: 0.5 if p.ndim - batch_axes > 1 else None, params)


_DISTRIBUTIONS = {
    "partial of uniform": functools.partial(uniform, sparsity=0.5),
    "partial of erk": functools.partial(erk, sparsity=0.5),
    "Uniform": sparsity.Uniform(0.5),
    "ERK": sparsity.ERK(0.5),
    "a function": _select_matrices,
    "partial of a function": functools.partial(_select_matrices),
    "a lambda": lambda params, *, batch_axes: _select_matrices(params, batch_axes),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _DISTRIBUTIONS)
@pytest.mark.parametrize("trainer", [sparsity.MagnitudePruning, sparsity.StaticRandomSparse])
def test_the_batch_axes_of_an_updater_reach_its_distribution(kind, trainer):
    for axes in (1, 0):
        updater = trainer(batch_axes=axes, sparsity_distribution_fn=_DISTRIBUTIONS[kind])
        targets = updater.init_state(_STACK).target_sparsities
        assert float(targets["kernel"]) > 0
        assert (targets["bias"] is None) == (axes == 1)
        if trainer is sparsity.MagnitudePruning:
            masks = updater.instant_sparsify(_STACK)[1]
            assert (masks["bias"] is None) == (axes == 1)
            if axes == 1:
                assert np.all(np.asarray(masks["kernel"]).sum(axis=(1, 2)) == 12)


@pytest.mark.slow
def test_batch_axes_as_a_function_reach_the_distribution():
    pruner = sparsity.MagnitudePruning(
        batch_axes=lambda path, param: int(path[0] == "layers"),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
    )
    params = {"layers": _STACK, "head": _STACK}
    masks = pruner.instant_sparsify(params)[1]
    assert masks["layers"]["bias"] is None
    assert int(masks["head"]["bias"].sum()) == 6


@pytest.mark.parametrize(
    "distribution",
    [
        sparsity.Uniform(0.5, batch_axes=0),
        sparsity.ERK(0.5, batch_axes=0),
        functools.partial(uniform, sparsity=0.5, batch_axes=0),
        functools.partial(erk, sparsity=0.5, batch_axes=0),
    ],
    ids=["Uniform", "ERK", "uniform", "erk"],
)
def test_batch_axes_of_the_distribution_come_first(distribution):
    pruner = sparsity.MagnitudePruning(batch_axes=1, sparsity_distribution_fn=distribution)
    targets = pruner.init_state(_STACK).target_sparsities
    assert targets["bias"] is not None
    # With the axes of the updater it would be dense.
    pruner = sparsity.MagnitudePruning(
        batch_axes=1, sparsity_distribution_fn=functools.partial(uniform, sparsity=0.5)
    )
    assert pruner.init_state(_STACK).target_sparsities["bias"] is None


def test_a_distribution_without_that_parameter_is_called_as_ever():
    calls = []

    def plain(*args, **kwargs):
        calls.append((args, kwargs))
        return {"kernel": 0.5, "bias": None}

    pruner = sparsity.MagnitudePruning(batch_axes=1, sparsity_distribution_fn=plain)
    masks = pruner.instant_sparsify(_STACK)[1]
    assert calls == [((_STACK,), {})]
    assert np.all(np.asarray(masks["kernel"]).sum(axis=(1, 2)) == 12)


def test_erk_counts_a_stack_by_the_shape_of_one_layer():
    # Alone, (10, 10) and (50, 50) at 0.5 have 0.0 and 0.52; stacks of three have the same.
    params = {"a": jnp.ones((3, 10, 10)), "b": jnp.ones((3, 50, 50))}
    pruner = sparsity.MagnitudePruning(batch_axes=1, sparsity_distribution_fn=sparsity.ERK(0.5))
    targets = pruner.init_state(params).target_sparsities
    np.testing.assert_allclose([targets["a"], targets["b"]], [0.0, 0.52], rtol=1e-6)


@pytest.mark.slow
def test_global_pruners_hand_on_batch_axes_given_by_a_function():
    pruner = sparsity.GlobalMagnitudePruning(
        sparsity=0.5, batch_axes=lambda path, param: int(path[-1] == "bias")
    )
    masks = pruner.instant_sparsify({"kernel": jnp.ones((4, 6)), "bias": jnp.ones((2, 6))})[1]
    assert masks["bias"] is None  # its one axis beyond the batch axes: not selected
    assert int(masks["kernel"].sum()) == 12


# Hooks that make masks get the sites by name.


def _paths_and_patterns(sites):
    return {site.name: site.pattern for site in map(sites.__getitem__, sites)}


def test_hooks_that_name_sites_get_those_of_the_parameters():
    seen = {}

    class Asking(sparsity.MagnitudePruning):
        def get_initial_masks(self, params, target_sparsities, sites=None):
            seen["initial"] = _paths_and_patterns(sites)
            return super().get_initial_masks(params, target_sparsities)

        def calculate_scores(self, params, sparse_state=None, grads=None, *, sites):
            seen["scores"] = _paths_and_patterns(sites)
            return jax.tree.map(lambda x: (100 * jnp.abs(x)).astype(jnp.int32), params)

        def create_masks(self, scores, sparsities, *, sites):
            seen["masks"] = _paths_and_patterns(sites)
            return super().create_masks(scores, sparsities, sites=sites)

    def kind(path, param):
        return sparsity.NByM(2, 4) if param.dtype == jnp.bfloat16 else sparsity.Unstructured()

    updater = Asking(
        sparsity_type=kind,
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    state = tx.init(_params())
    _, state = tx.update(_grads(), state, _params())
    expected = {
        "half": sparsity.NByM(2, 4),
        "full": sparsity.Unstructured(),
        "bias": sparsity.NByM(2, 4),
    }
    assert seen == {"initial": expected, "scores": expected, "masks": expected}
    # The scores are integers: without the sites, `half` would be no N:M leaf.
    assert np.all(np.asarray(state.masks["half"]).reshape(-1, 4).sum(axis=1) == 2)
    instant = updater.instant_sparsify(_params())[1]
    np.testing.assert_array_equal(instant["half"], state.masks["half"])


def test_a_hook_that_takes_all_keywords_gets_those_of_the_loop_alone():
    seen = {}

    class Taking(sparsity.MagnitudePruning):
        def calculate_scores(self, params, sparse_state=None, grads=None, **extra):
            seen.update(extra)
            return jax.tree.map(jnp.abs, params)

    updater = Taking(
        sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    tx.update(_grads(), tx.init(_params()), _params(), value=3)
    assert seen == {"value": 3}
