"""A bias is a leaf that is added to the outputs of one product, as it is, and to nothing else."""

import jax
import jax.numpy as jnp
import pytest

from sparsity import trace

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.ones(3), "square": jnp.ones((3, 3))}
X = jnp.ones((5, 4))


MODELS = {
    "plain": (lambda p, x: x @ p["w"] + p["b"], True),
    "beside a shortcut": (lambda p, x: x[:, :3] + x @ p["w"] + p["b"], True),
    "transposed": (lambda p, x: (p["w"].T @ x.T).T + p["b"][None], True),
    "vmapped": (lambda p, x: jax.vmap(lambda row: row @ p["w"] + p["b"])(x), True),
    "cast": (lambda p, x: (x @ p["w"]).astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16), True),
    "scaled": (lambda p, x: x @ p["w"] + 2 * p["b"], False),
    "of a scaled weight": (lambda p, x: x @ (2 * p["w"]) + p["b"], False),
    "after an activation": (lambda p, x: jnp.tanh(x @ p["w"]) + p["b"], False),
    "along the rows": (lambda p, x: x[:3] @ p["w"] + p["b"][:, None], False),
    "added twice": (lambda p, x: (x @ p["w"] + p["b"]) * p["b"], False),
    "of two products": (lambda p, x: x @ p["w"] @ p["square"] + x @ p["w"] + p["b"], False),
    "outputs that are read without it": (lambda p, x: (x @ p["w"], x @ p["w"] + p["b"]), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bias_is_found_where_it_is_one(name):
    model, is_bias = MODELS[name]
    assert (trace(model, PARAMS, X).biases.get(("w",)) == ("b",)) == is_bias


def test_a_bias_in_another_order_than_the_outputs_is_none():
    params = {"w": jnp.ones((4, 6)), "b": jnp.ones(6)}

    def model(p, x):
        outputs = x @ p["w"].reshape(4, 2, 3).transpose(0, 2, 1).reshape(4, 6)
        return outputs + p["b"].reshape(3, 2).reshape(6)

    assert not trace(model, params, X).biases


def test_biases_of_scanned_layers_heads_and_experts():
    params = {
        "layers": {"w": jnp.ones((2, 3, 3)), "b": jnp.ones((2, 3))},
        "heads": {"w": jnp.ones((3, 2, 4)), "b": jnp.ones((2, 4))},
        "experts": {"w": jnp.ones((2, 4, 5)), "b": jnp.ones((2, 5))},
    }

    def model(params, x):
        def layer(h, p):
            return jnp.tanh(h @ p["w"] + p["b"]), None

        x = jax.lax.scan(layer, x, params["layers"])[0]
        x = jnp.einsum("rk,khd->rhd", x, params["heads"]["w"]) + params["heads"]["b"]
        p = params["experts"]
        return jnp.einsum("rek,eko->ero", x, p["w"]) + p["b"][:, None]

    assert trace(model, params, jnp.ones((6, 3))).biases == {
        (name, "w"): (name, "b") for name in params
    }
