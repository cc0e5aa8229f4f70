"""Selection of sharded scores: what is found, where it lies, and what leaves a device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sparsity import selection
from tests.scripts.devices import same, scores, traffic
from tests.selection_oracle import best


def eligible(*shape):
    return np.random.default_rng(1).integers(0, 2, shape).astype(np.uint8)


def masks_equal_those_of_one_device_and_keep_the_sharding(devices):
    x, where = scores(16, 64), eligible(16, 64)
    mask, some = best(x, 300), best(x, 300, where)
    with jax.set_mesh(devices.mesh):
        sharded = devices.put(x, "a", "b")
        same(selection.topk_mask(sharded, 300), mask, sharded)
        sharded = devices.put(x, ("a", "b"), None)
        where_sharded = devices.put(where, ("a", "b"), None)
        same(selection.topk_mask(sharded, 300, where=where_sharded), some, sharded)
    hashes = selection.hash_scores(x.shape, 1, 2)
    drawn = jax.jit(
        lambda w: selection.topk_mask(selection.hash_scores(x.shape, 1, 2), 300, where=w)
    )
    np.testing.assert_array_equal(drawn(where_sharded), best(hashes, 300, where))
    sharded = devices.put(x, None, ("a", "b"))
    same(selection.topk_mask(sharded, 300), mask, sharded)  # no mesh in the context


def slices_are_selected_where_they_are(devices):
    x, where = scores(8, 16, 16), eligible(8, 16, 16)
    mask = np.stack([best(y, 77) for y in x])
    some = np.stack([best(y, k, w) for k, (y, w) in enumerate(zip(x, where, strict=True))])
    with jax.set_mesh(devices.mesh):
        sharded = devices.put(x, "a", "b")
        same(selection.topk_mask(sharded, 77, batch_axes=1), mask, sharded)
        where = devices.put(where, "a", "b")
        actual = selection.topk_mask(x, np.arange(8), where=where, batch_axes=1)
        np.testing.assert_array_equal(actual, some)
        sharded = devices.put(x, None, "a", "b")
        mapped = jax.jit(jax.vmap(lambda x: selection.topk_mask(x, 77)))
        same(mapped(sharded), mask, sharded)


def trees_are_selected_where_they_are(devices):
    tree = {"a": scores(16, 64), "b": scores(8, 4, 16, seed=1), "c": scores(32, seed=2)}
    specs = {"a": ("a", "b"), "b": (None, "b"), "c": (("a", "b"),)}
    sharded = {name: devices.put(x, *specs[name]) for name, x in tree.items()}
    masks = best(np.concatenate([x.ravel() for x in tree.values()]), 900)
    with jax.set_mesh(devices.mesh):
        actual = selection.global_topk_mask(sharded, 900)
    for name, mask in actual.items():
        expected, masks = np.split(masks, [mask.size])
        same(mask, expected.reshape(mask.shape), sharded[name])


def groups_are_selected_where_they_are(devices):
    values = scores(16, 64)
    cases = ((0, 6), (1, 4)) if devices.is_explicit else ((0, 4), (1, 6))
    for axis, m in cases:  # of 6 the last group is shorter
        groups = selection.nm_mask(values, 2, m, axis=axis)
        for spec in (("a", "b"), (("a", "b"), None)):  # the latter splits groups of axis 0
            x = devices.put(values, *spec)
            mask = selection.nm_mask(x, 2, m, axis=axis)
            np.testing.assert_array_equal(mask, groups)
            if devices.is_explicit or (m == 4 and spec == ("a", "b")):
                same(mask, groups, x)


def shards_are_selected_from_within_shard_map(devices):
    x, spec = scores(16, 64), P("a", "b")
    local = jax.shard_map(
        lambda x: selection.topk_mask(x, 10), mesh=devices.mesh, in_specs=spec, out_specs=spec
    )
    trees = jax.shard_map(
        lambda *tree: selection.global_topk_mask(tree, 10),
        mesh=devices.mesh,
        in_specs=spec,
        out_specs=spec,
    )
    mask, (first, second) = np.asarray(local(x)), trees(x[:8], x[8:])
    for i in range(0, 16, 8):
        for j in range(0, 64, 16):
            block = np.s_[i : i + 8, j : j + 16]
            np.testing.assert_array_equal(mask[block], best(x[block], 10))
            block = np.s_[i // 2 : i // 2 + 4, j : j + 16]
            expected = best(np.concatenate([x[:8][block], x[8:][block]]), 10)
            actual = np.concatenate([first[block], second[block]])
            np.testing.assert_array_equal(actual, expected)


def only_counts_leave_a_device(devices):
    for spec in (("a", "b"), (("a", "b"), None), (None, ("a", "b"))):
        x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=devices.sharding(*spec))
        with jax.set_mesh(devices.mesh):
            masked = jax.jit(lambda x: selection.topk_mask(x, jnp.int32(3_000_000)))
            compiled = masked.lower(x).compile()
        assert 0 < traffic(compiled) * 24 <= 128 * 1024  # in loops: at most 24 times
        local = 4096 * 4096 // 8
        assert compiled.memory_analysis().temp_size_in_bytes <= 9 * local  # keys, ties and masks
        assert compiled.output_shardings.is_equivalent_to(x.sharding, 2)
    groups = jax.jit(lambda x: selection.nm_mask(x, 2, 4)).lower(x).compile()
    assert traffic(groups) == 0


def hash_scores_shard_without_communication(devices):
    draw = jax.jit(
        lambda step: selection.hash_scores((512, 512), 1, step),
        out_shardings=devices.sharding("a", "b"),
    )
    assert traffic(draw.lower(jnp.uint32(3)).compile()) == 0
    np.testing.assert_array_equal(draw(jnp.uint32(3)), selection.hash_scores((512, 512), 1, 3))


_BOTH = [
    masks_equal_those_of_one_device_and_keep_the_sharding,
    slices_are_selected_where_they_are,
    trees_are_selected_where_they_are,
    groups_are_selected_where_they_are,
    only_counts_leave_a_device,
]
CASES = {
    "Auto": [
        *_BOTH,
        shards_are_selected_from_within_shard_map,
        hash_scores_shard_without_communication,
    ],
    "Explicit": _BOTH,
}
