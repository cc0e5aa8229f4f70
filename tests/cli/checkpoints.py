"""Checkpoints of all formats, written and read by the packages that the formats are from."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy


def nested(tree):
    """What msgpack and Orbax hold beside arrays."""
    return {"net": tree, "step": np.array(7, np.int32), "nothing": None, "empty": {}}


def save_orbax(path, tree):
    ocp.PyTreeCheckpointer().save(path, tree | {"kind": "text", "list": [np.ones(3, np.float32)]})


def restore_orbax(path):
    """As numpy arrays, without what the checkpoint says of devices."""
    metadata = ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(), metadata)
    return ocp.PyTreeCheckpointer().restore(path, restore_args=args)


# Name of the file: how a tree is saved, and how it is read again.
FORMATS = {
    "a.safetensors": (
        lambda path, tree: safetensors.numpy.save_file(tree, path, metadata={"by": "test"}),
        safetensors.numpy.load_file,
    ),
    "a.npz": (
        lambda path, tree: np.savez(path, **{k: v for k, v in tree.items() if k != "bf16"}),
        lambda path: dict(np.load(path)),
    ),
    "a.msgpack": (
        lambda path, tree: path.write_bytes(flax.serialization.msgpack_serialize(nested(tree))),
        lambda path: flax.serialization.msgpack_restore(path.read_bytes()),
    ),
    "a_folder": (lambda path, tree: save_orbax(path, nested(tree)), restore_orbax),
}


def weights(seed=0):
    """Leaves of several shapes and dtypes."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.normal(size=(16, 32)).astype(np.float32),
        "conv": rng.normal(size=(3, 3, 4, 8)).astype(np.float16),
        "bf16": np.asarray(jnp.asarray(rng.normal(size=(8, 8)), jnp.bfloat16)),
        "double": rng.normal(size=(4, 8)),
        "bias": rng.normal(size=32).astype(np.float32),
        "count": np.arange(6),
    }
