"""What the compiler makes of a search: how it grows with a tree, and what it stores."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsity
from sparsity import selection
from sparsity.selection import EntryScores, Ranked
from sparsity.selection.cpu import visits
from sparsity.selection.cpu.rows import cut_rows
from tests import helpers


def compiled(shapes, together=False):
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def masks(leaves):
        k = jnp.full(1 if together else len(leaves), 1000, jnp.uint32)
        lazy = [Ranked.wrap(EntryScores(jnp.abs, (x,))) for x in leaves]
        return selection.topk_masks(lazy, (k & 0, k), together=together)

    return jax.jit(masks).lower(leaves).compile()


def instructions(program):
    return len(re.findall("(?m)^ +(?:ROOT )?%?[^ ]+ = ", program.as_text()))


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True], ids=["layerwise", "global"])
@pytest.mark.parametrize(("shape", "most"), [((256, 80), 320), ((40, 50), 150)])
def test_a_leaf_adds_some_instructions_and_no_search(shape, most, together):
    few, many = (instructions(compiled([shape] * n, together)) for n in (8, 12))
    assert (many - few) / 4 < most


@pytest.mark.slow
def test_large_leaves_are_counted_where_they_are(both_searches):
    program = compiled([(512, 500)] * 8)
    assert program.memory_analysis().temp_size_in_bytes < 0.02 * 8 * 512 * 500


@pytest.mark.slow
def test_rows_of_bfloat16_are_widened_as_they_are_read():
    def count(x, pivots, ends):
        rows = cut_rows([Ranked.wrap(EntryScores(jnp.abs, (x,)))], *x.shape)
        return visits._count_above(rows, pivots, *ends)

    leaf = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    pivots = jax.ShapeDtypeStruct((1, 3), jnp.int16)
    ends = [jax.ShapeDtypeStruct((1, 1024), jnp.int32)] * 2
    program = jax.jit(count).lower(leaf, pivots, ends).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * leaf.size


@pytest.mark.parametrize(
    "name",
    helpers.slow_but(["magnitude"], ["magnitude", "random", "global_magnitude", "rigl", "set"]),
)
def test_an_update_stores_no_scores(name):
    options = {"update_freq": 10, "update_start_step": 0, "update_end_step": 100}
    pruner = sparsity.create_updater_from_config({"algorithm": name, "sparsity": 0.9, **options})
    params = [jax.ShapeDtypeStruct((512, 500), jnp.float32)] * 4

    def update(grads, state, params):
        new = pruner.update_state(state, params, grads)
        return new.masks

    state = jax.eval_shape(pruner.init_state, params)
    program = jax.jit(update).lower(params, state, params).compile()
    weights = 4 * 512 * 500
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * weights  # masks of what is kept
    step = pruner.wrap_optax(optax.sgd(0.1))
    state = jax.eval_shape(step.init, params)
    program = jax.jit(step.update).lower(params, state, params).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * weights
