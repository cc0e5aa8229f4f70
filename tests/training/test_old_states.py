"""States that were saved before `SparseState` had a place for what algorithms remember."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import sparsity


def _old_class():
    class SparseState(NamedTuple):
        masks: Any
        inner_state: Any
        target_sparsities: Any
        count: Any

    return SparseState


def _saved_and_fresh(cls, packed):
    """An old state, the present one with the same arrays, and a fresh one to restore into."""
    updater = cls(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(2),
        use_packed_masks=packed,
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params = {"w": jnp.arange(1.0, 33.0).reshape(4, 8), "b": jnp.ones(8)}
    state = tx.update(params, tx.init(params), params)[1]
    old = _old_class()(*state[:4])
    return old, state, jax.tree.map(jnp.zeros_like, tx.init(params))


def _standard(saved, fresh, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "run", jax.eval_shape(lambda: fresh))


def _tree(saved, fresh, folder, **options):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", saved)
        arguments = ocp.checkpoint_utils.construct_restore_args(fresh)
        restore = ocp.args.PyTreeRestore(item=fresh, restore_args=arguments, **options)
        return checkpointer.restore(folder / "run", args=restore)


def _partial(saved, fresh, folder):
    return _tree(saved, fresh, folder, partial_restore=True)


def _bytes(saved, fresh, folder):
    return serialization.from_bytes(fresh, serialization.to_bytes(saved))


def _dictionary(saved, fresh, folder):
    return serialization.from_state_dict(fresh, serialization.to_state_dict(saved))


_WAYS = {
    "standard": _standard,
    "orbax": _tree,
    "orbax, partially": _partial,
    "bytes": _bytes,
    "dictionary": _dictionary,
}


def _check(restore, cls, packed, folder):
    old, state, fresh = _saved_and_fresh(cls, packed)
    found = restore(old, fresh, folder)
    assert type(found) is type(state)
    assert found.algorithm_state is None
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)


kinds = pytest.mark.parametrize(
    ("cls", "packed"),
    [(sparsity.MagnitudePruning, False), (sparsity.RigL, True)],
    ids=["bytes", "bits"],
)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("way", _WAYS)
def test_an_old_state_is_restored_as_ever(way, cls, packed, tmp_path):
    _check(_WAYS[way], cls, packed, tmp_path)
