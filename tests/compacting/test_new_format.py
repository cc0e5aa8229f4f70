"""A format of kept values is added by one class and one entry of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import compact, trace
from sparsity.compacting.compact import FORMAT_LAYOUTS
from sparsity.compacting.formats import FormatLayout
from sparsity.masks.slice_layout import SliceLayout


class Backwards(FormatLayout):
    """Kept values [*stack, k] from the last entry of each slice to the first one."""

    format = "backwards"
    refusal = "its slices keep different numbers of entries."

    @classmethod
    def make(cls, parameter):
        shape, stack = parameter.mask.shape, parameter.stack
        positions = SliceLayout(shape, stack).list_positions(flip(parameter.mask, stack))
        if positions.size != parameter.mask.sum():
            return None
        return cls(shape, stack, slice_kept_shape=positions.shape[-1:]), positions

    def take(self, array, positions):
        return super().take(flip(jnp.asarray(array), self.stack), positions)

    def scatter_slice(self, values, positions, flat):
        return flat[::-1].at[positions].set(values)[::-1]

    def mark_units(self, mask):
        return self.slices(mask)[..., ::-1].reshape(-1, self.slice_size)


def flip(array, stack):
    return array[tuple(slice(None, None, 1 if i in stack else -1) for i in range(array.ndim))]


def fn(params, x):
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
    return h @ params["w"]


@pytest.mark.slow
def test_a_format_of_one_class_and_one_entry_is_stored_multiplied_moved_and_reported(monkeypatch):
    monkeypatch.setitem(FORMAT_LAYOUTS, Backwards.format, Backwards)
    rng = np.random.default_rng(0)
    masks = {"layers": np.zeros((2, 3, 3), np.uint8), "w": np.zeros((3, 2), np.uint8)}
    masks["layers"][:, :, 1] = 1
    masks["w"][[0, 2], [1, 0]] = 1
    params = {x: jnp.asarray(rng.normal(size=mask.shape) * mask) for x, mask in masks.items()}
    x = jnp.asarray(rng.normal(size=(4, 3)))
    graph = trace(fn, params, x)
    by_values = compact(graph, params, masks, formats=dict.fromkeys(masks, "values"))
    adam = optax.adam(0.1)
    formats = dict.fromkeys(masks, "backwards")
    model = compact(graph, params, masks, adam.init(params), adam, formats=formats)

    assert set(model.formats.values()) == {"backwards"}
    assert set(compact(graph, params, masks).formats.values()) == {"values"}
    np.testing.assert_array_equal(model.params["w"], [params["w"][2, 0], params["w"][0, 1]])
    np.testing.assert_array_equal(model.indices["w"], [1, 4])  # from the end
    np.testing.assert_array_equal(model.params["layers"], by_values.params["layers"][:, ::-1])
    jax.tree.map(np.testing.assert_array_equal, model.dense(model.params), params)
    jax.tree.map(np.testing.assert_array_equal, model.masks, masks)
    assert "backwards" in model.report()
    assert "backwards" in model.measure(model.params, x, rounds=1)["w",]

    @jax.jit
    def differentiate(model, params, x):
        loss = lambda params: (model.apply(params, x) ** 2).sum()  # noqa: E731
        gradients = jax.grad(loss)(params)
        return model.apply(params, x), model.dense(gradients)

    outputs = (differentiate(each, each.params, x) for each in (model, by_values))
    jax.tree.map(np.testing.assert_array_equal, *outputs)

    pruner = sparsity.RigL(
        drop_fraction_fn=optax.constant_schedule(0.5),
        batch_axes=lambda path, param: param.ndim - 2,
    )

    def move(model):
        state = optax.TraceState(trace=model.params)
        loss = lambda apply, params: (apply(params, x) ** 2).sum()  # noqa: E731
        moved, params, state = model.move(pruner, model.params, state, 0, loss)
        return moved.masks, moved.dense(params), moved.dense_state(state)

    moved = move(model)
    assert any(np.any(moved[0][name] != mask) for name, mask in masks.items())
    jax.tree.map(np.testing.assert_array_equal, moved, move(by_values))
