"""Parts of an array are read by one kernel, whatever their places are."""

import re

import jax
import jax.numpy as jnp

from sparsity.core.kernels import read_part


def test_no_place_of_a_part_is_a_constant_of_its_kernel():
    x = jax.ShapeDtypeStruct((24,), jnp.float32)
    program = jax.jit(lambda x: [jnp.sin(read_part(x, 3 * i, 3)) for i in range(8)])
    text = program.lower(x).compile().as_text()
    assert len(re.findall(r"= f32\[3\]\S* dynamic-slice\(", text)) == 8
    assert not re.search(r"= f32\[3\]\S* slice\(", text)
