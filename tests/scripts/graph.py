"""Models on a mesh: what `sparsity.trace` finds inside and outside of shard_map."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import sparsity


def inside_shard_map_all_devices_count(devices):
    def local(x, w):
        return jax.lax.psum(x @ w, "b")

    def fn(params, x):
        mapped = jax.shard_map(
            local, mesh=devices.mesh, in_specs=(P("a", "b"), P("b", None)), out_specs=P("a", None)
        )
        return mapped(x, params["w"])

    params = {"w": devices.put(jnp.ones((16, 6)), "b", None)}
    graph = sparsity.trace(fn, params, devices.put(jnp.ones((4, 16)), "a", "b"))
    (use,) = graph.uses
    assert (use.path, use.contracting, use.output) == (("w",), (0,), (1,)), use
    assert use.macs == graph.macs() == 4 * 16 * 6, use.macs
    assert graph.groups == []
    assert {r.primitive for r in graph.refused} == {"shard_map"}, graph.refused


def parameters_on_a_mesh_have_the_uses_of_one_device(devices):
    def fn(params, x):
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    params = {"up": devices.put(jnp.ones((8, 16))), "down": devices.put(jnp.ones((16, 4)))}
    graph = sparsity.trace(fn, params, devices.put(jnp.ones((8, 8)), "a"))
    assert graph.macs() == 8 * (8 * 16 + 16 * 4)
    assert [(group.name, group.size) for group in graph.groups] == [("up:1", 16)]


_CASES = [inside_shard_map_all_devices_count, parameters_on_a_mesh_have_the_uses_of_one_device]
CASES = {"Auto": _CASES, "Explicit": _CASES}
