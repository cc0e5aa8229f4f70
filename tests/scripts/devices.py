"""Eight devices in a mesh, and what programs put there and look for."""

import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-|reduce-scatter|ragged-all"


class Devices:
    """A mesh with the axes "a" and "b", both of one kind."""

    def __init__(self, kind, shape=(2, 4)):
        self.kind = kind
        self.is_explicit = AxisType[kind] == AxisType.Explicit
        self.mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType[kind],) * 2)

    def sharding(self, *spec):
        return NamedSharding(self.mesh, P(*spec))

    def put(self, x, *spec):
        return jax.device_put(x, self.sharding(*spec))


def scores(*shape, seed=0):
    """Scores with ties."""
    return np.round(np.random.default_rng(seed).normal(size=shape), 1).astype(np.float32)


def same(sharded, expected, like):
    """The values are the expected ones, and lie where those of another array lie."""
    np.testing.assert_array_equal(sharded, expected)
    assert sharded.sharding.is_equivalent_to(like.sharding, like.ndim), (sharded, like)


def traffic(compiled):
    """Bytes that the collectives of a compiled program produce on a device, each counted once."""
    total = 0
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) (?:{COLLECTIVES})[\w-]*\(", line)
        arrays = match[1] if match else ""
        for bits, shape in re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", arrays):
            size = math.prod(int(d) for d in shape.split(",") if d)
            total += size * max(1, int(bits or 8) // 8)
    return total
