"""Every dtype of every format: a copy holds the same values of the same dtype, or there is none."""

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy

from sparsity.cli import main
from tests.cli.checkpoints import restore_orbax

HALF = ["--sparsity", "0.5"]
COMMON = ["float16", "float32", "float64", "complex64"]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
# Formats, and the dtypes that can be pruned in them.
PRUNED = {
    "a.safetensors": [*COMMON, *NARROW],
    "a.npz": [*COMMON, "complex128", ">f2", ">f4", ">f8", ">c8", ">c16"],
    "a.msgpack": [*COMMON, "complex128", *NARROW, "float8_e4m3b11fnuz", "float4_e2m1fn"],
    "a": [*COMMON, "complex128", *NARROW],
}
# The compiler does not know it; jax counts it among the numbers since 0.10.
FLOAT6 = ["float6_e2m3fn"] if jax.__version_info__ >= (0, 10) else []
OTHERS = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
# Formats, and dtypes that have no mask, or none that jax can make.
KEPT = {
    "a.safetensors": OTHERS,
    "a.npz": [*OTHERS, ">i2", ">u8", "longdouble", "clongdouble"],
    "a.msgpack": [*OTHERS, "int4", "uint2", "longdouble", "float8_e8m0fnu", *FLOAT6],
    "a": [*OTHERS, "int4"],
}
REFUSED = [
    ("a.npz", "longdouble"),
    ("a.npz", "clongdouble"),
    ("a.msgpack", "longdouble"),
    *(("a.msgpack", name) for name in FLOAT6),
]


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


def assert_same(array, expected):
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in PRUNED for dtype in PRUNED[name]]
)
def test_a_pruned_array_keeps_its_dtype_and_values(tmp_path, name, dtype):
    values = np.array([[1, 4], [2, 3]]).astype(dtype)
    if np.iscomplexobj(values):
        values *= 3 + 4j
    save(tmp_path / name, {"kept": values, "w": values})
    target = (tmp_path / name).with_stem("b")
    assert main(["prune", str(tmp_path / name), str(target), *HALF, "--filter", "w"]) == 0
    made = load(target)
    assert_same(made["kept"], values)
    assert_same(made["w"], np.where([[False, True], [False, True]], values, 0).astype(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in KEPT for dtype in KEPT[name]]
)
def test_an_array_without_a_mask_keeps_its_dtype_and_values(tmp_path, name, dtype):
    ones = np.ones((2, 2), np.float32)
    kept = np.array([[1, 0], [1, 1]]).astype(dtype)
    save(tmp_path / name, {"kept": kept, "w": ones})
    chosen = ["--filter", "w"] if kept.dtype.kind not in "biu" else []
    target = (tmp_path / name).with_stem("b")
    assert main(["prune", str(tmp_path / name), str(target), *HALF, *chosen]) == 0
    made = load(target)
    assert_same(made["kept"], kept)
    assert_same(made["w"], np.array([[1, 1], [0, 0]], np.float32))


@pytest.mark.parametrize(("name", "dtype"), REFUSED)
def test_a_dtype_that_jax_does_not_hold_is_refused_by_name(tmp_path, capsys, name, dtype):
    save(tmp_path / name, {"w": np.ones((2, 2), np.float32), "x": np.ones((2, 2)).astype(dtype)})
    before = (tmp_path / name).read_bytes()
    target = (tmp_path / name).with_stem("b")
    assert main(["prune", str(tmp_path / name), str(target), *HALF]) == 2
    error = capsys.readouterr().err
    assert f"'x' has the dtype {np.dtype(dtype)}" in error
    assert "--filter" in error
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before
    assert main(["inspect", str(tmp_path / name), "--json"]) == 0
