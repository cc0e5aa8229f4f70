"""Groups of channels that compete under one budget of multiply-adds or bytes."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import Coupled, MagnitudePruning, Uniform, budget, shrink, trace
from sparsity.masks.budgets import Cost
from tests.graph import models
from tests.shrinking.networks import SMALL
from tests.shrinking.oracles import list_remaining

relu = jax.nn.relu


def prune(graph, params, distribution, **options):
    """Params and masks."""
    scope = Coupled(graph, **{"across": True} | options)
    pruner = MagnitudePruning(scope=scope, sparsity_distribution_fn=distribution)
    return pruner.instant_sparsify(params)


def count_remaining(graph, params, distribution, **options):
    return list_remaining(graph, shrink(graph, *prune(graph, params, distribution, **options)))


def draw(**shapes):
    return models.draw(shapes, jnp.float32)


def two(params, x):
    """Two networks beside each other."""
    return relu(x @ params["a"]) @ params["b"], relu(x @ params["c"]) @ params["d"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_they_come_as_close_to_a_budget_as_channels_allow(name):
    """By multiply-adds and by bytes, although most channels tie."""
    model = SMALL[name]()
    params = jax.tree.map(jnp.ones_like, models.draw(model.shapes, jnp.float32))
    graph = trace(model.fn, params, *model.inputs)
    paths = {leaf.path for leaf in graph.parameters}
    for across, kind, cost in (
        (True, "macs", graph.costs.count_small_macs),
        ("nbytes", "nbytes", functools.partial(graph.costs.count_small_bytes, paths=paths)),
    ):
        for part in (0.35, 0.5, 0.95):
            kept = count_remaining(graph, params, budget(graph, **{kind: part}), across=across)
            kept_by_variable = dict(zip([x.variable for x in graph.groups], kept, strict=True))
            assert cost(kept_by_variable) <= part * cost({})
            more = [
                cost(kept_by_variable | {v: n + 1})
                for v, n in kept_by_variable.items()
                if n < v.size
            ]
            assert max(more) > part * cost({})


@pytest.mark.slow
def test_a_budget_that_channels_meet_is_met():
    params = draw(a=(3, 64), b=(64, 2), c=(3, 64), d=(64, 2))
    params["a"] *= 3
    graph = trace(two, params, jnp.ones((1, 3)))
    for multiple in (1, 8, 16):
        kept = count_remaining(graph, params, budget(graph, macs=0.5), round_to=multiple)
        assert sum(kept) == 64
        assert kept[0] > kept[1]
        assert all(n % multiple == 0 for n in kept)


@pytest.mark.slow
def test_channels_count_however_large_what_does_not_compete_is():
    def model(params, x):
        return (x + sum(two(params, x))) @ params["head"]

    params = draw(a=(8, 64), b=(64, 8), c=(8, 64), d=(64, 8)) | {"head": jnp.ones((8, 2**18))}
    graph = trace(model, params, jnp.ones((1, 8)))
    uniform = Uniform(filter_fn=lambda path, x: path[-1] in "abcd")
    kept = count_remaining(graph, params, budget(graph, macs=0.9999, distribution=uniform))
    assert sum(kept) == 2 * 64 - math.ceil(0.0001 * graph.macs() / 16)


def test_channels_that_were_removed_do_not_come_back():
    # After the first one, which costs 2, none of the others, which cost 20, would fit.
    params = {"a": jnp.ones((1, 4)), "b": jnp.array([[9.0], [0.3], [0.2], [0.1]])}
    params |= {"c": jnp.ones((10, 2)), "d": jnp.ones((2, 10))}
    graph = trace(
        lambda p, x: two({**p, "a": jnp.pad(p["a"], ((0, 9), (0, 0)))}, x),
        params,
        jnp.ones((1, 10)),
    )
    first, masks = prune(graph, params, Uniform(0.4))
    again = prune(graph, first, Uniform(0.42))[1]
    jax.tree.map(lambda one, more: np.testing.assert_array_less(more, one + 1), masks, again)


@pytest.mark.parametrize("is_traced", [False, True])
def test_no_group_dies_unless_its_sparsity_asks_for_it(is_traced):
    params = draw(a=(3, 64), b=(64, 2), c=(3, 64), d=(64, 2))
    params["a"] *= 1e4  # every channel of the first network ranks above all of the second
    graph = trace(two, params, jnp.ones((1, 3)))

    def count(sparsity, **options):
        return [
            mask.any(axis=0).sum()
            for name, mask in prune(graph, params, Uniform(sparsity), **options)[1].items()
            if name in "ac"
        ]

    run = jax.jit(count, static_argnames="min_channels") if is_traced else count
    assert [int(n) for n in run(0.5)] == [64 - 7, 7]  # 7 is a tenth of 64
    assert [int(n) for n in run(0.5, min_channels=1)] == [63, 1]
    assert [int(n) for n in run(0.9375)] == [4, 4]  # 4 of 64 are what this sparsity leaves
    assert [int(n) for n in run(0.99)] == [1, 1]  # the last channel of a group stays


@pytest.mark.slow
def test_a_scan_competes_as_its_layers_do_one_by_one():
    def block(x, up, down):
        return x + relu(x @ up) @ down

    def scanned(params, x):
        x = jax.lax.scan(
            lambda x, block_params: (block(x, *block_params), None), x, params["stack"]
        )[0]
        return block(x, *params["last"])

    def unrolled(params, x):
        for block_params in params:
            x = block(x, *block_params)
        return x

    drawn = draw(up=(8, 16), down=(16, 8))
    block_params = drawn["up"], drawn["down"]
    stack = jax.tree.map(lambda x: jnp.stack([x] * 4), block_params)
    x = jnp.ones((1, 8))
    graph = trace(unrolled, [block_params] * 5, x)
    assert count_remaining(graph, [block_params] * 5, Uniform(0.5)) == [8] * 5
    params = {"stack": stack, "last": block_params}
    assert count_remaining(trace(scanned, params, x), params, Uniform(0.5)) == [8, 8]


def test_multiples_and_the_least_number_are_kept():
    params = draw(a=(6, 32), b=(32, 16), c=(16, 3))
    graph = trace(lambda p, x: relu(relu(x @ p["a"]) @ p["b"]) @ p["c"], params, jnp.ones((1, 6)))
    for least, sizes in ((1, (4, 8, 12)), (5, (8, 12))):
        params, masks = prune(
            graph, params, budget(graph, macs=0.3), round_to=4, min_channels=least
        )
        small = shrink(graph, params, masks)
        assert set(list_remaining(graph, small)) <= set(sizes)
        assert 0.2 * graph.macs() < small.macs() <= 0.3 * graph.macs()


def test_a_budget_of_bytes_is_that_of_the_parameters_that_are_pruned():
    def model(variables, x):
        return relu(x @ variables["params"]["a"]) @ variables["params"]["b"] @ variables["state"]

    variables = {"params": draw(a=(8, 64), b=(64, 8)), "state": jnp.ones((8, 1000))}
    graph = trace(model, variables, jnp.ones((1, 8)))
    for across in (False, "nbytes"):
        for part, kept in ((1.0, 64), (0.5, 32)):
            masks = prune(graph, variables["params"], budget(graph, nbytes=part), across=across)[1]
            # The width, 8, goes on into `state`, which is no parameter here.
            assert int(masks["a"].sum() + masks["b"].sum()) <= 16 * kept
            assert int(masks["a"].any(0).sum()) >= kept


def test_more_multiply_adds_than_an_int32_holds_compete():
    def model(params, x):
        return relu(x @ params["up"]) @ params["down"], x @ params["head"]

    params = models.abstract({"up": (1024, 8), "down": (8, 1024), "head": (1024, 4096)})
    params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    graph = trace(model, params, jax.ShapeDtypeStruct((1024, 1024), jnp.float32))
    assert graph.macs() > 2**31
    assert count_remaining(graph, params, budget(graph, macs=0.998)) == [3]


def test_what_cannot_be_kept_is_refused():
    params = {"w": jnp.ones(3)}
    graph = trace(lambda params, x: x, params, jnp.ones(3))
    for across, kind, remedy in ((True, "nbytes", "'nbytes'"), ("nbytes", "macs", "True")):
        with pytest.raises(ValueError, match=f"the {kind} of this budget. Use across = {remedy}"):
            budget(graph, **{kind: 0.5})(params, scope=Coupled(graph, across=across))
    for across in ("m", 1, None):
        with pytest.raises(ValueError, match="across must be True, False or 'nbytes', got across"):
            Coupled(graph, across=across)
    params = draw(a=(3, 4), b=(4, 2), c=(3, 4), d=(4, 2))
    graph = trace(two, params, jnp.ones((1, 3)))
    pruner = MagnitudePruning(scope=Coupled(graph, across=True))
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\], got sparsity = 1.5"):
        pruner.create_masks(params, jax.tree.map(lambda _: 1.5, params))


def test_costs_are_exact_of_traced_sizes():
    rng = np.random.default_rng(0)
    most = [5000, 64, 70_000]
    for _ in range(4):
        numbers = [Cost.variable(i) for i in range(3)]
        one = sum(
            (
                int(rng.integers(1, 2**20)) * numbers[rng.integers(3)] * numbers[rng.integers(3)]
                for _ in range(4)
            ),
            Cost.convert(10**12),
        )
        other = numbers[0] * Fraction(int(rng.integers(1, 2**40)), 4) + Fraction(1, 3)
        cost = Cost({}, [[one, other]]) + numbers[1]
        sizes = [int(rng.integers(1, n)) for n in most]
        fits = jax.jit(lambda x, more, cost=cost: cost.make_limit(most, x)(more))
        for more in ([0, 0, 0], [0, 1, 0], [0, -1, 0], [1, -1, 0], [-1, 1, 1], [1, -1, -1]):
            changed = [n + x for n, x in zip(sizes, more, strict=True)]
            expected = cost.value(changed) <= cost.value(sizes)
            assert bool(fits(*(jnp.array(x, jnp.uint32) for x in (sizes, changed)))) == expected


@pytest.mark.slow
def test_of_many_branches_the_costliest_count():
    def network(params, i, x):
        return relu(x @ params[i][0]) @ params[i][1]

    def nothing(params, i, x):
        return 0 * x

    def traced(count, other):
        def model(params, x):
            for i in range(count):
                one, more = (functools.partial(fn, params, i) for fn in (network, other))
                x = x + jax.lax.cond(x[0, 0] > i, one, more, x)
            return x

        drawn = draw(up=(2, 4), down=(4, 2))
        params = [(drawn["up"], drawn["down"])] * count
        return params, trace(model, params, jnp.ones((1, 2)))

    def before(params, i, x):
        return network(params, i - 1, x)

    params, graph = traced(24, nothing)
    assert count_remaining(graph, params, budget(graph, macs=0.5)) == [2] * 24
    params, graph = traced(12, before)
    small = shrink(graph, *prune(graph, params, budget(graph, macs=0.5)))
    assert small.macs() == 0.5 * graph.macs()


@pytest.mark.slow
def test_channels_of_a_branch_that_costs_less_have_a_price():
    def model(params, x):
        b, d = ((lambda x, n=n: relu(x @ params[n][0]) @ params[n][1]) for n in "bd")
        return jax.lax.cond(x[0, 0] > 0, b, d, x)

    drawn = draw(up=(4, 10), down=(10, 4))
    params = {"b": (drawn["up"] * 100, drawn["down"] * 100)}
    params["d"] = drawn["up"][:, :9], drawn["down"][:9]
    graph = trace(model, params, jnp.ones((1, 4)))
    assert count_remaining(graph, params, budget(graph, macs=0.5))[0] == 5


def test_a_budget_of_fractions_of_a_multiply_add_is_not_exceeded():
    def model(params, x):
        x = jax.lax.conv_transpose(x, params["up"], (2, 2), "VALID")
        return jnp.einsum("bhwc,cd->bhwd", x, params["down"])

    params = draw(up=(3, 3, 1, 12), down=(12, 1))
    graph = trace(model, params, jnp.ones((1, 3, 3, 1)))
    for share in (0.4997753, 0.25, 0.501, 0.9):
        kept = count_remaining(graph, params, budget(graph, macs=share))
        small_macs = graph.costs.count_small_macs({graph.groups[0].variable: kept[0]})
        assert small_macs <= Fraction(share) * Fraction(graph.costs.count_small_macs({}))
