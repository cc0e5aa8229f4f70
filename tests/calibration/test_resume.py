"""An interrupted one-shot run continues from the layers that are finished."""

import functools
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import Report
from sparsity.calibration.run.fingerprint import fingerprint
from sparsity.calibration.run.resume import LayerStore
from tests import helpers

PRUNER = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
PARAMS = {
    "layers": jax.random.normal(jax.random.key(0), (2, 8, 8), jnp.bfloat16),
    "last": jax.random.normal(jax.random.key(1), (8, 3)),
}
BATCHES = [jax.random.normal(jax.random.key(i), (10, 8)) for i in (2, 3)]


def model(params, x):
    x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
    return x @ params["last"]


class Refit:
    """Multiplies what stays."""

    def __init__(self, factor=0.5):
        self.factor = factor

    def __call__(self, dense, pruned, mask, statistic, select):
        return self.factor(pruned) if callable(self.factor) else self.factor * pruned, mask


@pytest.fixture
def interrupt(monkeypatch):
    """Interrupts a run before it has saved so many layers; `None` lets it run."""
    write = LayerStore.write
    remaining = [None]

    def written(self, index, layer):
        if remaining[0] == 0:
            raise KeyboardInterrupt
        remaining[0] = remaining[0] and remaining[0] - 1
        write(self, index, layer)
        WRITTEN.append(index)

    monkeypatch.setattr(LayerStore, "write", written)
    WRITTEN.clear()

    def after(count):
        remaining[0] = count

    return after


WRITTEN = []


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("refit", [None, Refit()])
def test_a_run_goes_on_where_it_was_interrupted_with_the_same_bits(
    tmp_path, sequential, refit, interrupt
):
    def run(folder=None):
        return sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, refit, sequential, folder)

    expected = run()
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run")
    assert WRITTEN == [0]
    interrupt(None)
    actual = run(tmp_path / "run")
    layers = 3 if sequential else 2  # a scan is pruned layer by layer, or as a whole
    assert [*range(layers)] == WRITTEN
    for ours, other in zip(*map(jax.tree.leaves, (actual[:2], expected[:2])), strict=True):
        assert ours.dtype == other.dtype
        np.testing.assert_array_equal(ours, other)
    again = run(tmp_path / "run")  # all is finished
    assert len(WRITTEN) == layers
    assert again[2] == actual[2]
    assert isinstance(again[2], Report)
    assert [row.error for row in actual[2].values()] == [row.error for row in expected[2].values()]


@pytest.mark.slow
def test_a_recurrent_loop_goes_on_where_it_was_interrupted(tmp_path, interrupt):
    params = {"in": jax.random.normal(jax.random.key(0), (8, 8)), "hidden": PARAMS["layers"][0]}

    def recurrent(params, x):
        step = lambda h, x: (jnp.tanh(x @ params["in"] + h @ params["hidden"]), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros(8), x)[0]

    def run(folder=None):
        return sparsity.oneshot(PRUNER, recurrent, params, BATCHES, folder=folder)

    expected = run()
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    interrupt(None)
    actual = run(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, actual[:2], expected[:2])


def transposed(params, x):
    x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, params["layers"])[0]
    return x @ params["last"]


def halves(first):
    def split(params, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
        one, other = x[:, :4], x[:, 4:]
        return jnp.concatenate([one, other] if first else [other, one], axis=1) @ params["last"]

    return split


def scaled(factor):
    return lambda params, x: model(params, factor * x)


def keeps(count):
    """A `topk_fn`."""
    return lambda scores, sparsity: (scores >= jnp.sort(scores.ravel())[-count]).reshape(
        scores.shape
    )


def wanda(**options):
    return sparsity.WandaPruning(sparsity_distribution_fn=helpers.half, **options)


def with_pattern(n):
    return wanda(sparsity_type=sparsity.NByM(n, 4, axis=-2))


class Louder(sparsity.WandaPruning):
    def score(self, weights, squares):
        return weights * squares


class Quieter(sparsity.WandaPruning):
    def score(self, weights, squares):
        return weights * jnp.sqrt(jnp.sqrt(squares))


def named_alike(factor):
    def refit(dense, pruned, mask, statistic, select):
        return factor * pruned, mask

    return refit


def multiplied(factor, dense, pruned, mask, statistic, select):
    return factor * pruned, mask


OTHERS = {
    "batches": ({}, {"batches": BATCHES[::-1]}),
    "params": ({}, {"params": PARAMS | {"last": PARAMS["last"] * 2}}),
    "sequential": ({}, {"sequential": False}),
    "sparsities": (
        {}, {"pruner": sparsity.WandaPruning(sparsity_distribution_fn=helpers.uniform(0.6))},
    ),
    "sparsities of a pattern": ({"pruner": with_pattern(1)}, {"pruner": with_pattern(2)}),
    "fn": ({}, {"fn": lambda params, x: model(params, x) * 3}),
    "fn that transposes": ({}, {"fn": transposed}),
    "fn with halves swapped": ({"fn": halves(True)}, {"fn": halves(False)}),
    "fn with another number": ({"fn": scaled(2.0)}, {"fn": scaled(3.0)}),
    "fn with another array": ({"fn": scaled(np.ones(8))}, {"fn": scaled(np.arange(8.0))}),
    "refit": ({}, {"refit": sparsity.ADMM()}),
    "refit of another number": ({"refit": sparsity.ADMM()}, {"refit": sparsity.ADMM(rho=0.5)}),
    "refit with another state": ({}, {"refit": Refit(0.25)}),
    "refit with another function": ({"refit": Refit(jnp.abs)}, {"refit": Refit(jnp.sign)}),
    "refit by another closure": ({"refit": named_alike(1)}, {"refit": named_alike(2)}),
    "refit by another partial": (
        {"refit": functools.partial(multiplied, 2)}, {"refit": functools.partial(multiplied, 3)},
    ),
    "pruner": ({}, {"pruner": sparsity.RIAPruning(sparsity_distribution_fn=helpers.half)}),
    "pruner with another topk_fn": (
        {"pruner": wanda(topk_fn=keeps(1))}, {"pruner": wanda(topk_fn=keeps(2))},
    ),
    "pruner of another seed": (
        {"pruner": wanda(rng_seed=jax.random.key(0))},
        {"pruner": wanda(rng_seed=jax.random.key(1))},
    ),
    "pruner of another class": (
        {"pruner": Louder(sparsity_distribution_fn=helpers.half)},
        {"pruner": Quieter(sparsity_distribution_fn=helpers.half)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_run_is_refused(tmp_path, name, interrupt):
    one, other = OTHERS[name]
    base = {
        "pruner": PRUNER, "fn": model, "params": PARAMS, "batches": BATCHES, "refit": Refit(),
    }  # fmt: skip
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        sparsity.oneshot(**base | one, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):  # the same run continues
        sparsity.oneshot(**base | one, folder=tmp_path)
    named = name.partition(" ")[0]
    with pytest.raises(ValueError, match=f"holds another run: its .*'{named}'.*differ.*Give anot"):
        sparsity.oneshot(**base | one | other, folder=tmp_path)


PROGRAM = """
import functools, json, sys
import jax, jax.numpy as jnp
import sparsity
from sparsity.calibration.run.resume import identify
from sparsity.calibration.run.task import make_task

FACTOR = {factor}

def refit(dense, pruned, mask, statistic, select):
    return FACTOR * pruned, mask

class Mine(sparsity.WandaPruning):
    def score(self, weights, squares):
        return weights * jnp.sqrt(squares) + {{"a": 1, "b": 2}}["a"]

def model(params, x):
    h = jax.nn.relu(x @ params["w"]).at[0].add(1)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])[0]

params = {{"w": jnp.ones((4, 4)), "stack": jnp.ones((2, 4, 4), jnp.bfloat16).astype(jnp.float32)}}
topk_fn = functools.partial(lambda s, scores, sparsity: scores > s, 3)
pruner = Mine(topk_fn=topk_fn, sparsity_distribution_fn=sparsity.Uniform(0.5))
batch = jnp.ones((2, 4))
task = make_task(pruner, refit, model, params, batch)
print(json.dumps(identify(task, model, params, [batch], names={{"x", "y", "z"}})))
"""


@pytest.mark.slow
def test_another_process_has_the_same_fingerprints_wherever_the_code_lies(tmp_path):
    def identity(seed, factor=2, before=""):
        script = tmp_path / f"script{seed}.py"
        script.write_text(before + PROGRAM.format(factor=factor))
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-P", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    first = identity(1)
    assert identity(2, before="\n# moved down\n\n") == first
    other = identity(3, factor=3)
    assert {name for name in first if first[name] != other[name]} == {"refit"}


def pool(fn):
    return lambda x: jax.lax.reduce_window(x, 0.0, fn, (2,), (1,), "SAME")


WITHIN_PRIMITIVES = {
    "scatter": (lambda x: x.at[0].apply(jnp.sin), lambda x: x.at[0].apply(jnp.cos)),
    "reduce_window": (pool(lambda a, b: a + 2 * b), pool(lambda a, b: a + 3 * b)),
    "segment_sum": [
        (lambda x, n=n: jax.ops.segment_sum(x, jnp.array([0, 1, 0, 1]), n)) for n in (2, 3)
    ],
}


@pytest.mark.parametrize("name", WITHIN_PRIMITIVES)
def test_functions_within_primitives_are_told_by_their_equations(name):
    one, equal, other = (
        fingerprint(jax.make_jaxpr(lambda x, fn=fn: fn(x))(jnp.ones(4)))
        for fn in (WITHIN_PRIMITIVES[name][i] for i in (0, 0, 1))
    )
    assert one == equal != other


@pytest.mark.parametrize("dtype", [object, [("x", object)], np.dtypes.StringDType()])
def test_arrays_of_objects_are_told_by_their_content(dtype):
    def draw(letter):
        # New objects each time, too long for numpy to store them beside their lengths.
        texts = [20 * letter, 30 * letter]
        return np.array([(x,) for x in texts] if isinstance(dtype, list) else texts, dtype)

    one, equal, other = draw("a"), draw("a"), draw("b")
    assert fingerprint(one) == fingerprint(equal) != fingerprint(other)
    assert fingerprint(one[0]) == fingerprint(equal[0]) != fingerprint(other[0])


def test_arrays_of_objects_without_a_description_are_refused():
    with pytest.raises(ValueError, match=r"Generator.*no description"):
        fingerprint(np.array([np.random.default_rng(0)], object))


def test_masked_arrays_are_told_by_their_masks():
    one, equal, other = (np.ma.array([1, 2], mask=[0, x]) for x in (0, 0, 1))
    assert fingerprint(one) == fingerprint(equal) != fingerprint(other)


def test_what_another_process_could_not_recognize_is_refused_before_anything_is_written(tmp_path):
    generator = np.random.default_rng(0)
    refit = lambda dense, pruned, mask, *_: (pruned * generator.random(), mask)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"refit cannot be told: Generator.*no description.*without"
    ):
        sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, refit, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()

    def with_callback(params, x):
        keep = lambda x: x + np.float32(generator.random() * 0)  # noqa: E731
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return model(params, jax.pure_callback(keep, shape, x))

    with pytest.raises(
        ValueError, match=r"fn cannot be told: callback of the pure_callback at .*test"
    ):
        sparsity.oneshot(PRUNER, with_callback, PARAMS, BATCHES, folder=tmp_path / "run")


@pytest.mark.parametrize("name", ["params", "batches"])
def test_arrays_without_values_are_refused_before_anything_is_written(tmp_path, name):
    arrays = {"params": PARAMS, "batches": BATCHES}
    shapes = jax.eval_shape(lambda: arrays[name])
    with pytest.raises(ValueError, match=rf"{name}\[.*\] has no values yet"):
        sparsity.oneshot(PRUNER, model, **arrays | {name: shapes}, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batches_refused_before_the_first_layer_leave_the_folder_to_the_corrected_run(tmp_path):
    for wrong in (BATCHES[1][:5], BATCHES[1].at[0].set(jnp.inf)):
        with pytest.raises(ValueError, match=r"must be alike|not all finite"):
            sparsity.oneshot(PRUNER, model, PARAMS, [BATCHES[0], wrong], folder=tmp_path)
    assert len(sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path)[2]) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/run cannot be written: Not a directory"):
        sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path / "file" / "run")


def test_a_damaged_folder_is_refused_with_the_file_and_a_remedy(tmp_path):
    sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path)
    about, text = tmp_path / "run.json", (tmp_path / "run.json").read_text()
    for damaged in ("", text[:-9], "[1]"):
        about.write_text(damaged)
        with pytest.raises(ValueError, match=r"run.json cannot be read: .*, delete the folder"):
            sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path)
    about.write_text(text)
    (tmp_path / "1" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match=r"1 cannot be read: .*, delete it and run again"):
        sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"thesis.tex is a file. Give a new or empty folder"):
        sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="holds other files"):
        sparsity.oneshot(PRUNER, model, PARAMS, BATCHES, folder=tmp_path)


SOURCE = """
import dataclasses, functools

FACTOR = 2

def helper(x):
    return FACTOR * x

@functools.lru_cache
def cached(x):
    return helper(x)

def make(factor):
    def inner(x):
        return factor * x
    return inner

scaled = make(4)

@dataclasses.dataclass
class Base:
    number: int = 3

    @property
    def double(self):
        return 2 * self.number

class Refit(Base):
    __slots__ = ("scale",)

    def __init__(self):
        super().__init__()
        self.scale = scaled

    def __call__(self, x, *, shift=1):
        try:
            return recursive(cached(x), 5)
        except ValueError:
            return [inner + shift for inner in {6, 7}]

def recursive(x, depth=8):
    return recursive(x, depth - 1) if depth else Refit().double * x
"""
CHANGES = {
    "global": ("FACTOR = 2", "FACTOR = 3"),
    "code of a helper": ("FACTOR * x", "FACTOR + x"),
    "helper": ("return helper(x)", "return abs(x)"),
    "code of a closure": ("factor * x", "factor - x"),
    "value in a closure": ("make(4)", "make(5)"),
    "field": ("number: int = 3", "number: int = 4"),
    "property of a base": ("2 * self.number", "3 * self.number"),
    "constant": ("cached(x), 5", "cached(x), 6"),
    "default": ("depth=8", "depth=9"),
    "default of a keyword": ("shift=1", "shift=2"),
    "caught exception": ("except ValueError", "except TypeError"),
    "code within a comprehension": ("inner + shift", "inner - shift"),
    "set": ("{6, 7}", "{6, 9}"),
    "base": ("class Refit(Base)", "class Refit(Base, float)"),
}


def load(source):
    """Returns an object of a module of the user's."""
    module = types.ModuleType("user_module")
    exec(source, vars(module))
    return module.Refit()


def test_the_same_code_has_the_same_fingerprint_on_other_lines():
    moved = SOURCE.replace("def helper", "# a comment\n\ndef helper")
    assert fingerprint(load(SOURCE)) == fingerprint(load(moved))


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_part_of_a_users_code_changes_the_fingerprint(name):
    before, after = CHANGES[name]
    assert SOURCE.count(before) == 1
    assert fingerprint(load(SOURCE)) != fingerprint(load(SOURCE.replace(before, after)))
