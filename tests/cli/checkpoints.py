"""Checkpoints of all formats, written and read by the packages that the formats are from."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
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


COMMON = ["float16", "float32", "float64", "complex64"]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
# Formats, and the dtypes that can be pruned in them.
PRUNED = {
    "a.safetensors": [*COMMON, *NARROW],
    "a.npz": [*COMMON, "complex128", ">f2", ">f4", ">f8", ">c8", ">c16"],
    "a.msgpack": [*COMMON, "complex128", *NARROW, "float8_e4m3b11fnuz", "float4_e2m1fn"],
    "a": [*COMMON, "complex128", *NARROW],
}
OTHERS = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]


def save(path, tree):
    if path.suffix == ".safetensors":
        safetensors.numpy.save_file(tree, path)
    elif path.suffix == ".npz":
        np.savez(path, **tree)
    elif path.suffix == ".msgpack":
        path.write_bytes(flax.serialization.msgpack_serialize(tree))
    else:
        ocp.PyTreeCheckpointer().save(path, tree)


def load(path):
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".msgpack":
        return flax.serialization.msgpack_restore(path.read_bytes())
    if not path.suffix:
        return restore_orbax(path)
    # The package gives numpy no float8: its bytes and the names of its dtypes.
    dtypes = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    named = {"F": "float", "I": "int", "U": "uint", "C": "complex"}
    tree = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        code = entry["dtype"]
        dtype = dtypes.get(code) or ("bool" if code == "BOOL" else named[code[0]] + code[1:])
        tree[name] = np.frombuffer(entry["data"], np.dtype(dtype)).reshape(entry["shape"])
    return tree


ORBAX_LAYOUTS = [(database, zarr3) for database in (True, False) for zarr3 in (True, False)]


def save_orbax_layout(path, tree, *, database=True, zarr3=False, metadata=None):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=database, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, custom_metadata=metadata))
