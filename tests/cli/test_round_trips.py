"""Pruning, inspecting and comparing checkpoints agree, for every format and dtype."""

import json

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from sparsity.cli import main
from tests import helpers
from tests.cli.checkpoints import OTHERS, PRUNED, load, save
from tests.properties import strategies as draws

# By endings; a folder of Orbax has none.
DTYPES = {name.removeprefix("a"): [*dtypes, *OTHERS] for name, dtypes in PRUNED.items()}
SHAPES = [shape for shape in draws.SHAPES if len(shape) > 1]


def run(capsys, *command):
    code = main([*map(str, command)])
    out, error = capsys.readouterr()
    assert "Traceback" not in error
    return code, out, error


@draws.examples(20)
@hypothesis.given(st.sampled_from([*DTYPES]), draws.seeds, draws.sparsities, st.data())
def test_prune_inspect_and_diff_agree(tmp_path_factory, capsys, ending, seed, target, data):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("files")
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES[ending]), min_size=1, max_size=4))
    tree = {}
    for index, dtype in enumerate(dtypes):
        shapes = SHAPES if ending else [shape for shape in SHAPES if 0 not in shape]
        shape = data.draw(st.sampled_from(shapes))  # Orbax saves no empty arrays
        drawn = np.nan_to_num(np.asarray(draws.values(rng, shape, "float32")), posinf=1, neginf=-1)
        # The magnitude of a complex denormal is 0 for the compiler.
        dtype = jnp.dtype(dtype)
        normal = np.where(np.abs(drawn) < 1e-30, 0, drawn) if dtype.kind == "c" else drawn
        largest = 1e3 if dtype.itemsize > 1 else 6  # of the narrowest floats
        with np.errstate(all="ignore"):
            tree[f"w{index}"] = normal.clip(-largest, largest).astype(dtype)
    before, after = folder / f"before{ending}", folder / f"after{ending}"
    save(before, tree)
    code, _, error = run(capsys, "prune", before, after, "--sparsity", repr(target))
    if all(dtype in OTHERS for dtype in dtypes):
        assert code == 0 or error.count("\n") == 1
        return
    assert (code, error) == (0, "")
    pruned = load(after)
    listed = json.loads(run(capsys, "inspect", after, "--json")[1])["leaves"]
    code, out, _ = run(capsys, "diff", before, after, "--json")
    moved = json.loads(out)["leaves"]
    assert pruned.keys() == tree.keys() == listed.keys() == moved.keys()
    for name, leaf in tree.items():
        new = np.asarray(pruned[name])
        assert (new.shape, new.dtype) == (leaf.shape, leaf.dtype)
        nonzeros = np.count_nonzero(new)
        assert listed[name]["nonzeros"] == nonzeros
        assert moved[name]["dropped"] == np.count_nonzero(leaf) - nonzeros
        assert (moved[name]["grown"], moved[name]["changed"]) == (0, 0)
        if leaf.dtype.name in OTHERS:
            assert new.tobytes() == leaf.tobytes()
        else:
            assert ((new == 0) | (new == leaf)).all()
            kept = helpers.num_kept(leaf.size, target) if leaf.size else 0
            assert nonzeros == min(np.count_nonzero(leaf), kept)
    assert code == any(leaf["dropped"] or leaf["bits"] for leaf in moved.values())
    assert run(capsys, "diff", after, after)[0] == 0
