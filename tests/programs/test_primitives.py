"""Every primitive of the installed jax is analysed, or known to pin what it touches."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from sparsity.graph import coupling, trace
from sparsity.programs import program as jaxprs
from sparsity.programs.products import NO_PRODUCTS

# These are not analysed either, and may multiply matrices: the table names them.
UNCOUNTED = {
    "call", "cholesky", "custom_lin", "custom_linear_solve", "eig", "eigh", "fft", "hessenberg",
    "householder_product", "lu", "qr", "schur", "svd", "triangular_solve", "tridiagonal",
    "tridiagonal_solve",
}  # fmt: skip
# What these do along axes is not analysed: all that they touch keeps its channels.
PINNING = NO_PRODUCTS | UNCOUNTED | {"shard_map", "xla_pmap"}  # the latter up to jax 0.8


def names():
    actual = [value for value in vars(primitives).values() if isinstance(value, Primitive)]
    return {primitive.name for primitive in actual}


def test_each_primitive_of_jax_is_analysed_or_pins():
    followed = set().union(*coupling.ANALYSED_PRIMITIVES, jaxprs.CONTROL, jaxprs.CALLS)
    assert names() - followed - PINNING == set()
    assert PINNING & followed == set()


def test_each_primitive_has_one_entry():
    assert len(set().union(*coupling.ANALYSED_PRIMITIVES)) == sum(
        map(len, coupling.ANALYSED_PRIMITIVES)
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.fft.fft(x).real,
        lambda x: jnp.linalg.svd(x)[1],
        lambda x: lax.approx_max_k(x, 3)[0],
        lambda x: jnp.linalg.qr(x)[1],
        lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)),
    ],
    ids=["fft", "svd", "approx_top_k", "qr", "reduce"],
)
def test_a_primitive_that_is_not_analysed_pins_with_its_name(fn, request):
    params = {"up": jnp.ones((3, 6))}
    graph = trace(lambda p, x: fn(x @ p["up"]).sum(), params, jnp.ones((4, 3)))
    assert graph.groups == []
    (refusal,) = [refusal for refusal in graph.refused if refusal.axis == 1]
    assert refusal.primitive.startswith(request.node.callspec.id)
    assert refusal.reason == "an operation that is not analysed"
    assert "test_primitives.py" in refusal.source


def test_a_primitive_of_ones_own_pins():
    custom = Primitive("own")
    custom.def_abstract_eval(lambda x: x)
    params = {"up": jax.ShapeDtypeStruct((3, 6), jnp.float32)}
    graph = trace(lambda p, x: custom.bind(x @ p["up"]).sum(), params, jnp.ones((4, 3)))
    assert graph.groups == []
    assert [refusal.primitive for refusal in graph.refused] == ["input", "own"]
