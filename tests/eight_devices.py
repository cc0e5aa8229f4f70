"""Runs code on eight virtual devices, in a process of its own."""

import os
import pathlib
import subprocess
import sys
import textwrap

TESTS = pathlib.Path(__file__).resolve().parent
PREAMBLE = """
import math, re
import jax, jax.numpy as jnp, numpy as np
from tests.selection_oracle import best
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sparsity import selection

KIND = AxisType.{kind}
MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(KIND, KIND))
RNG = np.random.default_rng(0)

def put(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))

def scores(*shape):
    return np.round(RNG.normal(size=shape), 1).astype(np.float32)

def same(sharded, expected, like):
    np.testing.assert_array_equal(sharded, expected)
    assert sharded.sharding.is_equivalent_to(like.sharding, like.ndim), (sharded, like)

def traffic(compiled):
    "Bytes that the collectives of a compiled program produce on a device, each counted once."
    total = 0
    for line in compiled.as_text().splitlines():
        kind = r"all-gather|all-reduce|all-to-all|collective-|reduce-scatter|ragged-all"
        found = re.search(r"= (.*?) (?:%s)[\\w-]*\\(" % kind, line)
        arrays = found[1] if found else ""
        for bits, shape in re.findall(r"[a-z]+(\\d*)\\w*\\[([\\d,]*)\\]", arrays):
            size = math.prod(int(d) for d in shape.split(",") if d)
            total += size * max(1, int(bits or 8) // 8)
    return total
"""


def run(kind, body):
    """Runs code after the preamble, whose mesh of (2, 4) devices has axes of that kind."""
    run_program(PREAMBLE.replace("{kind}", kind) + textwrap.dedent(body))


def run_program(program):
    """Runs code that sees eight devices, and the tests' modules by name."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    paths = str(TESTS.parent)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr[-3000:]
