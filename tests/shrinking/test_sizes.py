"""How much is left of known networks when half of every group of channels is removed."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import (
    SET,
    Coupled,
    MagnitudePruning,
    PeriodicSchedule,
    Plan,
    Uniform,
    budget,
    shrink,
    trace,
)
from sparsity.selection import num_kept
from sparsity.shrinking.plan import plan_cut
from tests.graph import models
from tests.shrinking.networks import SMALL
from tests.shrinking.oracles import list_remaining


def halved(model):
    """Parameters, those that are left, and the share of multiply-adds, from shapes alone."""
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    macs = graph.costs.count_small_macs({group.variable: group.size // 2 for group in graph.groups})
    return *parameters(graph, graph.groups), macs / graph.macs()


def parameters(graph, groups):
    """Parameters, and those that are left when half of the channels of these groups go."""
    plan = plan_cut(graph, {group.variable: np.arange(group.size // 2) for group in groups}, {})
    full = remaining = 0
    for leaf in graph.parameters:
        if leaf.path[-1] in ("mean", "var"):  # statistics, which are not trained
            continue
        full += leaf.size
        remaining += math.prod(plan.shrink_shape(leaf.path, leaf.shape))
    return full, remaining


def test_half_of_every_group_of_resnet_18():
    full, remaining, _ = halved(models.resnet((2, 2, 2, 2), False))
    assert (full, remaining) == (11_689_512, 3_055_880)


@pytest.mark.slow
def test_half_of_every_group_of_resnet_50_is_a_quarter_of_its_multiply_adds():
    full, remaining, macs = halved(models.resnet((3, 4, 6, 3), True))
    # A quarter of all but the stem and the head: 2048 x 1000 + 1000 becomes 1024 x 1000 + 1000.
    assert (full, remaining) == (25_557_032, 6_917_640)
    assert macs == pytest.approx(0.257, abs=0.001)


class Transformer(nn.Module):
    """ViT-B/16 (Dosovitskiy et al. 2020)."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(768, (16, 16), (16, 16), name="patches")(x).reshape(len(x), -1, 768)
        token = self.param("token", nn.initializers.zeros, (1, 1, 768))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, 768)), x], 1)
        x = x + self.param("positions", nn.initializers.zeros, (1, 197, 768))
        for _ in range(12):
            x = x + nn.MultiHeadDotProductAttention(num_heads=12)(nn.LayerNorm()(x))
            x = x + nn.Dense(768)(nn.gelu(nn.Dense(3072)(nn.LayerNorm()(x))))
        return nn.Dense(1000, name="head")(nn.LayerNorm()(x)[:, 0])


@pytest.mark.slow
def test_halves_of_a_vision_transformer():
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    shapes = jax.eval_shape(Transformer().init, jax.random.key(0), image)
    graph = trace(Transformer().apply, shapes, image)
    sizes = [group.size for group in graph.groups]
    # The width; of each layer the MLP, the heads, and the sizes of q with k, and of v.
    assert {n: sizes.count(n) for n in set(sizes)} == {768: 1, 3072: 12, 12: 12, 64: 24}
    outer = [group for group in graph.groups if group.size != 64]
    assert parameters(graph, outer) == (86_567_656, 22_050_664)  # ViT-S/16 has the latter
    # 192 of 384 in all heads: 384 x 192 + 192 less for q, k and v, 192 x 384 for out, in 12 layers.
    inner = 12 * (3 * (384 * 192 + 192) + 192 * 384)
    assert parameters(graph, graph.groups)[1] == 22_050_664 - inner == 18_504_808


def pruned(name, distribution=None, **options):
    """(graph, params, scope, the smaller model) of magnitude pruning."""
    model = SMALL[name]()
    params = models.draw(model.shapes, jnp.float32)
    graph = trace(model.fn, params, *model.inputs)
    distribution = distribution or (lambda graph: Uniform(0.5))
    pruner = MagnitudePruning(
        scope=Coupled(graph, **options), sparsity_distribution_fn=distribution(graph)
    )
    masks = pruner.instant_sparsify(params)[1]
    return graph, params, pruner.scope, shrink(graph, params, masks)


@pytest.mark.parametrize("name", SMALL)
def test_every_axis_with_channels_keeps_half_of_its_entries(name):
    graph, _, _, small = pruned(name)
    sizes = {x.path: x.shape for x in small.graph.parameters}
    for path, axis in {member for group in graph.groups for member in group.members}:
        full = graph.parameters.find_shape(path)[axis]
        assert sizes[path][axis] == num_kept(full, 0.5), (path, axis)


@pytest.mark.slow
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_a_budget_is_never_exceeded_and_one_more_channel_of_each_group_would(name, across):
    for macs in (0.3, 0.6, 0.9):
        graph, _, _, small = pruned(name, functools.partial(budget, macs=macs), across=across)
        assert small.macs() <= macs * graph.macs()
        more = {
            group.variable: min(group.size, remaining + 1)
            for group, remaining in zip(graph.groups, list_remaining(graph, small), strict=True)
        }
        assert graph.costs.count_small_macs(more) >= macs * graph.macs()


def test_what_is_left_of_a_model_knows_the_groups_that_it_was_cut_from():
    graph, params, scope, small = pruned("vit")
    # Of two heads of 4 channels one is left, which is no group any more.
    assert [group.size for group in graph.groups] == [8, 2, 4, 12]  # the stream first
    assert [group.size for group in small.graph.groups] == [4, 4, 6]
    sparsities = jax.tree.map(lambda _: 0.75, params)
    assert list(scope.count_channels(params, sparsities).values()) == [2, 1, 2, 3]
    scope = dataclasses.replace(scope, plan=small.plan)
    assert list(scope.count_channels(small.params, sparsities).values()) == [2, 1, 2, 3]
    assert list(scope.count_channels(params, sparsities).values()) == [2, 1, 2, 3]


def test_where_shapes_do_not_tell_what_is_left_the_plan_does():
    def model(params, x):
        one, other = jnp.split(x @ params["w"], 2, axis=1)
        return jnp.concatenate([jnp.tanh(one), jax.nn.relu(other)], axis=1) @ params["v"]

    params = {"w": jnp.ones((3, 16)), "v": jnp.ones((16, 2))}
    graph = trace(model, params, jnp.ones((1, 3)))
    sparsities = {"w": 0.75, "v": 0.75}
    for removed in ((2, 6), (6, 2)):
        stays = jnp.ones(16, jnp.uint8).at[: removed[0]].set(0).at[16 - removed[1] :].set(0)
        masks = {
            "w": jnp.ones((3, 1), jnp.uint8) * stays,
            "v": stays[:, None] * jnp.ones((1, 2), jnp.uint8),
        }
        small = shrink(graph, params, masks)
        assert [group.size for group in small.graph.groups] == [8 - n for n in removed]
        pruner = MagnitudePruning(
            scope=Coupled(graph), sparsity_distribution_fn=lambda _: sparsities
        )
        with pytest.raises(ValueError, match=r"channels of 'v:0', 'w:1' are left.*small.updater"):
            pruner.instant_sparsify(small.params)
        for scope in (small.updater(pruner).scope, Coupled(graph, plan=small.plan)):
            assert list(scope.count_channels(small.params, sparsities).values()) == [2, 2]
            assert list(scope.count_channels(params, sparsities).values()) == [2, 2]
        _, masks = small.updater(pruner).instant_sparsify(small.params)
        kept = np.asarray(masks["v"]).reshape(8, 2)[:, 0]
        assert [kept[: 8 - removed[0]].sum(), kept[8 - removed[0] :].sum()] == [2, 2]


@pytest.mark.slow
def test_a_process_that_has_the_plan_and_the_shapes_goes_on():
    _, params, _, small = pruned("vit")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    model = SMALL["vit"]()
    again = trace(model.fn, shapes, *model.inputs)
    plan = Plan.from_json(small.plan.to_json())
    smaller = plan.graph(again)
    names = [(group.name, group.size) for group in smaller.groups]
    assert names == [(group.name, group.size) for group in small.graph.groups]
    inputs = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), model.inputs)
    actual = plan.apply(again, small.params, *inputs)
    jax.tree.map(np.testing.assert_array_equal, actual, small.apply(small.params, *inputs))


def test_parameters_of_no_smaller_model_are_refused():
    params = {"w": jnp.ones((3, 16)), "v": jnp.ones((16, 2))}
    graph = trace(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], params, jnp.ones((1, 3)))
    wrong = {"w": jnp.ones((3, 9)), "v": jnp.ones((8, 2))}
    with pytest.raises(ValueError, match=r"no channels that are removed together leave \d of axis"):
        Coupled(graph).count_channels(wrong, {"w": 0.5, "v": 0.5})
    with pytest.raises(ValueError, match=r"shape \(2, 8\) at 'w'.*traced with \(3, 16\)"):
        Coupled(graph).count_channels(
            {"w": jnp.ones((2, 8)), "v": jnp.ones((8, 2))}, {"w": 0.5, "v": 0.5}
        )


@pytest.mark.parametrize("depths", [(3, 2), (2, 3), (2, 2)])
def test_scans_of_different_depth_are_cut(depths):
    def model(params, x):
        for stack in params:
            x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None), x, stack)
        return x

    shapes = [((n, 6, size), (n, size, 6)) for n, size in zip(depths, (8, 5), strict=True)]
    draw = np.random.default_rng(0).standard_normal
    params = [(jnp.asarray(draw(up)), jnp.asarray(draw(down))) for up, down in shapes]
    x = jnp.ones((1, 6))
    graph = trace(model, params, x)
    pruner = MagnitudePruning(
        scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5, filter_fn=graph.is_weight)
    )
    masked, masks = pruner.instant_sparsify(params)
    small = shrink(graph, masked, masks)
    assert [up.shape[2] for up, _ in small.params] == [4, 2]
    np.testing.assert_allclose(small.apply(small.params, x), model(masked, x), rtol=1e-5)


@pytest.mark.slow
def test_heads_and_their_sizes_keep_their_numbers_while_they_move():
    """Two groups lie along one axis: what one removes says nothing of the other."""
    model = SMALL["language_model"]()
    for seed in range(3):
        params = models.draw(model.shapes, jnp.float32, seed)
        graph = trace(model.fn, params, *model.inputs)
        updater = SET(
            scope=Coupled(graph),
            sparsity_distribution_fn=Uniform(0.4, filter_fn=graph.is_weight),
            scheduler=PeriodicSchedule(1, 1, 9),
        )
        state = updater.init_state(params)
        first = list_remaining(graph, shrink(graph, params, state.masks))
        for step in range(1, 5):
            state = updater.update_state(state._replace(count=jnp.int32(step)), params, params)
            assert list_remaining(graph, shrink(graph, params, state.masks)) == first


@pytest.mark.slow
def test_the_root_of_squares_is_in_range_at_any_scale():
    drawn = models.draw({"a": (6, 16), "b": (16, 3)}, jnp.float32)
    graph = trace(lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"], drawn, jnp.ones((1, 6)))
    actual = []
    for scale in (1.0, 2.0**-70, 2.0**70):
        pruner = MagnitudePruning(
            scope=Coupled(graph, order=2), sparsity_distribution_fn=Uniform(0.5)
        )
        params = jax.tree.map(lambda x, scale=scale: x * scale, drawn)
        actual.append(pruner.instant_sparsify(params)[1])
    jax.tree.map(np.testing.assert_array_equal, *actual[:2])
    jax.tree.map(np.testing.assert_array_equal, *actual[1:])
