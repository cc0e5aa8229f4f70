"""Every dtype of every format: a copy holds the same values of the same dtype, or there is none."""

import jax
import numpy as np
import pytest

from sparsity.cli import main
from tests.cli.checkpoints import OTHERS, PRUNED, load, save

HALF = ["--sparsity", "0.5"]
# The compiler does not know it; jax counts it among the numbers since 0.10.
FLOAT6 = ["float6_e2m3fn"] if jax.__version_info__ >= (0, 10) else []
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
    assert f"jax does not hold 'x' of {np.dtype(dtype)}" in error
    assert "--filter" in error
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before
    assert main(["inspect", str(tmp_path / name), "--json"]) == 0
