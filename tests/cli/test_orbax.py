"""Folders of Orbax: all layouts are read, and copies keep what they do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sparsity.cli import main
from tests.cli.checkpoints import ORBAX_LAYOUTS, save_orbax_layout

HALF = ["--sparsity", "0.5"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("database", "zarr3"), ORBAX_LAYOUTS)
def test_a_copy_keeps_the_types_of_values_and_what_is_not_pruned(tmp_path, database, zarr3):
    kernel = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    tree = {
        "a b": {"w": jnp.asarray(kernel), "v": kernel.astype(np.float64)},
        "list": [np.ones(2, np.int64)] * 11,
        "key": jax.random.key(3),
        "number": 2.5,
        "count": 7,
        "text": "t",
        "nothing": None,
    }
    source, target = tmp_path / "in put%20#", tmp_path / "out put%41"
    save_orbax_layout(source, tree, database=database, zarr3=zarr3, metadata={"by": "test"})
    (source / "notes.txt").write_text("not of the checkpoint")
    assert main(["prune", str(source), str(target), *HALF, "--filter", "a b/.*"]) == 0
    checkpointer = ocp.PyTreeCheckpointer()
    made = checkpointer.restore(target)
    mask = np.arange(12).reshape(3, 4) >= 6
    for name in ("w", "v"):
        np.testing.assert_array_equal(made["a b"].pop(name), kernel * mask)
        del tree["a b"][name]
    assert isinstance(checkpointer.restore(target)["a b"]["w"], jax.Array)
    assert jnp.issubdtype(made["key"].dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(
        jax.random.key_data(made.pop("key")), jax.random.key_data(tree.pop("key"))
    )
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    for new, old in zip(jax.tree.leaves(made), jax.tree.leaves(tree), strict=True):
        assert type(new) is type(old)
        np.testing.assert_array_equal(new, old)
    metadata = checkpointer.metadata(target).item_metadata
    assert metadata.custom_metadata == {"by": "test"}
    assert metadata.use_zarr3 == zarr3
    assert not (target / "notes.txt").exists()
