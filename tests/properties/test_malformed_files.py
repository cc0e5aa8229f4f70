"""Files whose descriptions lie are read as they say, or refused by name."""

import json
import zipfile

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

import sparsity
from sparsity.cli import main
from tests.graph import removal
from tests.malformed import lie
from tests.properties.strategies import EXAMPLES, FIRST

FILES = EXAMPLES or 60
BASE = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones(5, np.float16),
    "n": np.arange(3),
}


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command, which prints at most one error."""

    def check(*arguments):
        code = main([*map(str, arguments)])
        error = capsys.readouterr().err
        assert error.count("\n") == error.count("sparsity: error: ") == (code == 2), error
        return code

    return check


# Plans.


def model(params, x):
    return jnp.tanh(jnp.tanh(x @ params["up"] + params["bias"]) @ params["mid"]) @ params["down"]


@pytest.mark.drawn(10_000)
def test_a_plan_that_lies_is_refused_or_cuts_what_it_describes():
    draw, rng, cuts = np.random.default_rng(1).normal, np.random.default_rng(FIRST), 0
    shapes = {"up": (3, 4), "bias": (4,), "mid": (4, 6), "down": (6, 2)}
    params = {name: jnp.asarray(draw(size=shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(draw(size=(5, 3)), jnp.float32)
    graph = sparsity.trace(model, params, x)
    masks = removal.make_masks(graph, graph.groups, removal.choose(graph.groups, 0))
    masks = {path[0]: mask for path, mask in masks.items()}
    text = sparsity.shrink(graph, params, masks).plan.to_json()
    for number in range(FILES):
        try:
            plan = sparsity.Plan.from_json(json.dumps(lie(rng, json.loads(text))))
        except ValueError as error:
            assert "Not a plan written by Plan.to_json" in str(error)  # noqa: PT017
            continue
        try:
            small = sparsity.shrink(graph, params, plan)
        except ValueError:
            continue
        cuts += 1
        for path, axes in small.plan.kept.items():
            shape = list(params[path[0]].shape)
            for axis, index in axes.items():
                shape[axis] = len(index)
            assert small.params[path[0]].shape == tuple(shape), number
        masked = {
            name: jnp.zeros_like(leaf)
            .at[np.ix_(*read_kept(plan, name, leaf))]
            .set(leaf[np.ix_(*read_kept(plan, name, leaf))])
            for name, leaf in params.items()
        }
        np.testing.assert_allclose(small.apply(small.params, x), model(masked, x), atol=1e-5)
    assert cuts or number < 100


def read_kept(plan, name, leaf):
    axes = plan.kept.get((name,), {})
    return [axes.get(axis, np.arange(size)) for axis, size in enumerate(leaf.shape)]


# Headers of checkpoints.


def save_safetensors(rng, path):
    entry = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    header = {"__metadata__": {"a": "b"}, "w": entry}
    header["v"] = {"dtype": "I16", "shape": [4], "data_offsets": [48, 56]}
    text = json.dumps(lie(rng, header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(56))


def save_npz(rng, path):
    header = lie(rng, {"descr": "<f4", "fortran_order": bool(rng.integers(2)), "shape": [3, 4]})
    if isinstance(header.get("shape"), list):
        header["shape"] = tuple(header["shape"])
    text = f"{header}\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
        archive.writestr("w.npy", start + text + bytes(48))


def save_msgpack(rng, path):
    array = msgpack.packb(lie(rng, [[3, 4], "float32", bytes(48)], times=1))
    kind = int(rng.choice([1, 1, 2, 3]))  # of flax: array, complex number, number of numpy
    other = msgpack.packb([[2], "int8", bytes(2)])
    tree = {"w": msgpack.ExtType(kind, array), "v": msgpack.ExtType(1, other)}
    path.write_bytes(msgpack.packb(tree))


SAVE = {"safetensors": save_safetensors, "npz": save_npz, "msgpack": save_msgpack}


@pytest.mark.slow
@pytest.mark.drawn(10_000)
@pytest.mark.parametrize("ending", SAVE)
def test_a_header_that_lies_is_refused_or_read(tmp_path, run, ending):
    rng, codes = np.random.default_rng(FIRST), set()
    path, target = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    for _ in range(FILES):
        SAVE[ending](rng, path)
        code = run("inspect", path, "--json")
        pruned = run("prune", path, target, "--sparsity", "0.5", "--overwrite")
        assert pruned in (code, 2)
        codes.add(code)
        if pruned == 0:
            assert run("inspect", target) == 0
            target.unlink()
    assert codes == {0, 2}
