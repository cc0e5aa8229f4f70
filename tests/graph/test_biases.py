"""A bias is a leaf that is added to the outputs of one product, as it is, and to nothing else."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from sparsity import trace
from sparsity.graph.readers import Bias

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.ones(3), "square": jnp.ones((3, 3))}
X = jnp.ones((5, 4))


MODELS = {
    "plain": (lambda p, x: x @ p["w"] + p["b"], True),
    "beside a shortcut": (lambda p, x: x[:, :3] + x @ p["w"] + p["b"], True),
    "transposed": (lambda p, x: (p["w"].T @ x.T).T + p["b"][None], True),
    "vmapped": (lambda p, x: jax.vmap(lambda row: row @ p["w"] + p["b"])(x), True),
    "cast": (lambda p, x: (x @ p["w"]).astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16), True),
    "named": (lambda p, x: checkpoint_name(x @ p["w"], "outputs") + p["b"], True),
    "scaled": (lambda p, x: x @ p["w"] + 2 * p["b"], False),
    "of a scaled weight": (lambda p, x: x @ (2 * p["w"]) + p["b"], False),
    "after an activation": (lambda p, x: jnp.tanh(x @ p["w"]) + p["b"], False),
    "along the rows": (lambda p, x: x[:3] @ p["w"] + p["b"][:, None], False),
    "added twice": (lambda p, x: (x @ p["w"] + p["b"]) * p["b"], False),
    "of two products": (lambda p, x: x @ p["w"] @ p["square"] + x @ p["w"] + p["b"], False),
    "outputs that are read without it": (lambda p, x: (x @ p["w"], x @ p["w"] + p["b"]), False),
}


NORMED = {  # what shifts the outputs, whether it is subtracted, and the number of scales
    "a running mean": (lambda p, x: (x @ p["w"] - p["b"]) * p["scale"], ("b", True, 0)),
    "a shift": (lambda p, x: (x @ p["w"] - 3.0) * p["scale"] + p["b"], ("b", False, 1)),
    "behind two scales": (
        lambda p, x: x @ p["w"] * jax.lax.rsqrt(p["scale"]) / 2 + p["b"],
        ("b", False, 2),
    ),
    "behind a sum of parameters": (
        lambda p, x: x @ p["w"] + 2 * p["scale"] + p["b"],
        ("b", False, 0),
    ),
    "subtracted from": (lambda p, x: p["b"] - x @ p["w"], None),
    "scaled along the rows": (lambda p, x: x[:3] @ p["w"] * p["scale"][:, None] + p["b"], None),
    "scaled along two rows": (lambda p, x: x[:2] @ p["w"] * p["scale"][:2, None] + p["b"], None),
    "scaled by data": (lambda p, x: x @ p["w"] * x[:, :3] + p["b"], None),
    "in a scale, too": (lambda p, x: x @ p["w"] * jnp.sum(p["b"] ** 2) + p["b"], None),
    "of this batch": (lambda p, x: (x @ p["w"] - (x @ p["w"]).mean(0)) + p["b"], None),
    "scaled in a loop": (
        lambda p, x: jax.lax.fori_loop(
            0, 2, lambda _, y: (x @ p["w"]) * (2 * p["scale"]) + p["b"] + y, x[:, :3]
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", NORMED)
def test_what_shifts_normalized_outputs_is_found_where_it_is_exact(name):
    model, expected = NORMED[name]
    bias = trace(model, {**PARAMS, "scale": jnp.ones(3)}, X).biases.get(("w",))
    seen = bias and (*bias.path, bias.is_subtracted, len(bias.scales))
    assert seen == expected


HEADS = {
    "heads": lambda p, x: jnp.einsum("rk,khd->rhd", x, p["heads"]) * p["wide"] - p["shift"],
    "one factor a head": lambda p, x: (
        jnp.einsum("rk,khd->rhd", x, p["heads"]) / p["tall"][:, None] + p["shift"]
    ),
    "heads at the end": lambda p, x: (
        jnp.einsum("khd,rk->hdr", p["heads"], x) * p["wide"][:, :, None] + p["shift"][:, :, None]
    ),
    "one factor": lambda p, x: jnp.einsum("rk,khd->rhd", x, p["heads"]) / p["one"] + p["shift"],
}


@pytest.mark.parametrize("name", [*(name for name in NORMED if NORMED[name][1]), *HEADS])
def test_a_bias_that_is_shifted_stands_for_what_is_added_to_the_product(name):
    model, at, to = HEADS.get(name), "heads", "shift"
    if model is None:
        (model, (to, *_)), at = NORMED[name], "w"
    shapes = {
        **{name: array.shape for name, array in PARAMS.items()},
        "scale": (3,),
        "heads": (4, 2, 3),
        "shift": (2, 3),
        "wide": (2, 3),
        "tall": (2,),
        "one": (1, 1, 1),
    }
    params = {
        key: jnp.linspace(1, 2 + i / 2, math.prod(shape)).reshape(shape) ** 2
        for i, (key, shape) in enumerate(shapes.items())
    }
    graph = trace(model, params, X)
    bias, read = graph.biases[(at,)], graph.model.make_reader
    scales = [read({(key,): x for key, x in params.items()})(x.value) for x in bias.scales]
    added = jnp.linspace(-1, 3, params[to].size)
    shifted = bias.shift(params[to], added, scales)
    # Rows of X are ones, so that the product is less by what the bias adds.
    less = params[at] - added.reshape(params[to].shape) / 4
    np.testing.assert_allclose(
        model({**params, to: shifted, at: less}, X), model(params, X), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_bias_is_found_where_it_is_one(name):
    model, is_bias = MODELS[name]
    assert (trace(model, PARAMS, X).biases.get(("w",)) == Bias(("b",))) == is_bias


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
        (name, "w"): Bias((name, "b")) for name in params
    }


def test_values_of_a_model_need_the_parameters_that_they_depend_on():
    graph = trace(lambda p, x: x * p["scale"], {"scale": jnp.ones(3)}, jnp.ones((2, 3)))
    read = graph.model.make_reader({})
    with pytest.raises(
        ValueError, match="A value of the model depends on 'scale', which has shape"
    ):
        read(graph.model.program.inputs[0])
