"""Selection of sharded scores on eight virtual devices, in processes of their own."""

import pytest

from tests.eight_devices import run


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_masks_equal_those_of_one_device_and_keep_the_sharding(kind):
    run(
        kind,
        """
        x, where = scores(16, 64), RNG.integers(0, 2, (16, 64)).astype(np.uint8)
        mask, some = best(x, 300), best(x, 300, where)
        with jax.set_mesh(MESH):
            sharded = put(x, "a", "b")
            same(selection.topk_mask(sharded, 300), mask, sharded)
            sharded, eligible = put(x, ("a", "b"), None), put(where, ("a", "b"), None)
            same(selection.topk_mask(sharded, 300, where=eligible), some, sharded)
        drawn = jax.jit(lambda w: selection.topk_mask(
            selection.hash_scores(x.shape, 1, 2), 300, where=w))
        random = best(selection.hash_scores(x.shape, 1, 2), 300, where)
        np.testing.assert_array_equal(drawn(eligible), random)
        sharded = put(x, None, ("a", "b"))
        same(selection.topk_mask(sharded, 300), mask, sharded)  # no mesh in the context
        """,
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_slices_are_selected_where_they_are(kind):
    run(
        kind,
        """
        x, where = scores(8, 16, 16), RNG.integers(0, 2, (8, 16, 16)).astype(np.uint8)
        mask = np.stack([best(y, 77) for y in x])
        some = np.stack([best(y, k, w) for k, (y, w) in enumerate(zip(x, where))])
        with jax.set_mesh(MESH):
            sharded = put(x, "a", "b")
            same(selection.topk_mask(sharded, 77, batch_axes=1), mask, sharded)
            eligible = put(where, "a", "b")
            found = selection.topk_mask(x, np.arange(8), where=eligible, batch_axes=1)
            np.testing.assert_array_equal(found, some)
            sharded = put(x, None, "a", "b")
            mapped = jax.jit(jax.vmap(lambda x: selection.topk_mask(x, 77)))
            same(mapped(sharded), mask, sharded)
        """,
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_trees_and_groups_are_selected_where_they_are(kind):
    run(
        kind,
        """
        tree = {"a": scores(16, 64), "b": scores(8, 4, 16), "c": scores(32)}
        specs = {"a": P("a", "b"), "b": P(None, "b"), "c": P(("a", "b"))}
        sharded = {name: put(x, *specs[name]) for name, x in tree.items()}
        masks = best(np.concatenate([x.ravel() for x in tree.values()]), 900)
        with jax.set_mesh(MESH):
            found = selection.global_topk_mask(sharded, 900)
        for name, mask in found.items():
            expected, masks = np.split(masks, [mask.size])
            same(mask, expected.reshape(mask.shape), sharded[name])
        for axis, m in ((0, 4), (1, 4), (0, 6), (1, 6)):  # of 6 the last group is shorter
            groups = selection.nm_mask(tree["a"], 2, m, axis=axis)
            for spec in (("a", "b"), (("a", "b"), None)):  # the latter splits groups of axis 0
                x = put(tree["a"], *spec)
                mask = selection.nm_mask(x, 2, m, axis=axis)
                np.testing.assert_array_equal(mask, groups)
                if KIND == AxisType.Explicit or (m == 4 and spec == ("a", "b")):
                    same(mask, groups, x)
        """,
    )


def test_shards_are_selected_from_within_shard_map():
    run(
        "Auto",
        """
        x = scores(16, 64)
        local = jax.shard_map(
            lambda x: selection.topk_mask(x, 10), mesh=MESH, in_specs=P("a", "b"),
            out_specs=P("a", "b"))
        trees = jax.shard_map(
            lambda *tree: selection.global_topk_mask(tree, 10), mesh=MESH, in_specs=P("a", "b"),
            out_specs=P("a", "b"))
        mask, (first, second) = np.asarray(local(x)), trees(x[:8], x[8:])
        for i in range(0, 16, 8):
            for j in range(0, 64, 16):
                block = np.s_[i : i + 8, j : j + 16]
                np.testing.assert_array_equal(mask[block], best(x[block], 10))
                block = np.s_[i // 2 : i // 2 + 4, j : j + 16]
                expected = best(np.concatenate([x[:8][block], x[8:][block]]), 10)
                found = np.concatenate([first[block], second[block]])
                np.testing.assert_array_equal(found, expected)
        """,
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_only_counts_leave_a_device(kind):
    run(
        kind,
        """
        for spec in (("a", "b"), (("a", "b"), None), (None, ("a", "b"))):
            x = jax.ShapeDtypeStruct(
                (4096, 4096), jnp.float32, sharding=NamedSharding(MESH, P(*spec)))
            with jax.set_mesh(MESH):
                compiled = selection._topk_mask.lower(
                    x, (jnp.uint32(0), jnp.uint32(3_000_000)), None, 0).compile()
            assert 0 < traffic(compiled) * 24 <= 128 * 1024  # in loops: at most 24 times
            assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 1024
            assert compiled.output_shardings.is_equivalent_to(x.sharding, 2)
        groups = jax.jit(lambda x: selection.nm_mask(x, 2, 4)).lower(x).compile()
        assert traffic(groups) == 0
        """,
    )


def test_hash_scores_shard_without_communication():
    run(
        "Auto",
        """
        sharding = NamedSharding(MESH, P("a", "b"))
        draw = jax.jit(
            lambda step: selection.hash_scores((512, 512), 1, step), out_shardings=sharding)
        compiled = draw.lower(jnp.uint32(3)).compile()
        assert traffic(compiled) == 0
        np.testing.assert_array_equal(
            draw(jnp.uint32(3)), selection.hash_scores((512, 512), 1, 3))
        """,
    )
