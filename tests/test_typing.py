"""Programs of users, as a type checker sees them that knows the package as an installed one.

The checker is basedpyright in its mode `standard`, which is that of pyright; it brings all that it
needs, so that nothing is downloaded. The programs of `tests/typing` pass mypy and pyright in their
strict modes, but for functions of jax and optax whose types are unknown.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import sparsity
from tests.documents import blocks
from tests.helpers import ROOT

SETTINGS = {"typeCheckingMode": "standard", "pythonVersion": "3.11"}

USER = '''
"""An algorithm of one's own, and what a training loop does with it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsity
from sparsity import sparsity_distributions


@dataclasses.dataclass
class Signed(sparsity.BaseUpdater):
    slope: float = 0.5

    def calculate_scores(
        self, params: Any, sparse_state: sparsity.SparseState | None = None, grads: Any = None
    ) -> Any:
        return jax.tree.map(lambda w: jnp.where(w > 0, w, -self.slope * w), params)


params = {"kernel": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), "bias": jnp.zeros(4)}
half = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
pruner = Signed(
    scheduler=sparsity.OneShotSchedule(0),
    sparsity_distribution_fn=half,
    sparsity_type=sparsity.NByM(2, 4),
    slope=0.1,
)
slope: float = pruner.slope
tx = pruner.wrap_optax(optax.chain(optax.clip(1.0), optax.adam(1e-3)))
opt_state = tx.init(params)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["kernel"] + params["bias"])


@jax.jit
def train_step(
    params: optax.Params, opt_state: optax.OptState, x: jax.Array
) -> tuple[optax.Params, optax.OptState]:
    grads = jax.grad(loss)(pruner.pre_forward_update(params, opt_state), x)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return pruner.post_gradient_update(params, opt_state), opt_state


trained, opt_state = train_step(params, opt_state, jnp.ones((2, 8)))
state = sparsity.get_sparse_state(opt_state)
count: int = int(state.count)
text: str = sparsity.sparsity_table(trained, opt_state, pruner)
total: float = sparsity.summarize_sparsity(trained)["_total_sparsity"]

config = {"algorithm": "rigl", "sparsity": 0.9, "dist_type": "erk", "filter_fn": None}
updater: sparsity.BaseUpdater = sparsity.create_updater_from_config(config)
optimizer: optax.GradientTransformation = updater.wrap_optax(optax.sgd(0.1))
pruned, masks = pruner.instant_sparsify(params)
kernel: jax.Array = pruned["kernel"]
rigl = sparsity.RigL(drop_fraction_fn=optax.cosine_decay_schedule(0.3, 100))
fraction = rigl.drop_fraction_fn(3)


@dataclasses.dataclass(frozen=True)
class Rows(sparsity.SparsityType):
    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        return jnp.max(scores, axis=-1)

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        return jnp.broadcast_to(units[..., None], shape)


@dataclasses.dataclass
class Careful(sparsity.MagnitudePruning):
    """Keeps its masks while the loss, which the training loop passes, is high."""

    def update_state(
        self,
        sparse_state: sparsity.SparseState,
        params: Any,
        grads: Any,
        *,
        loss: float = 0.0,
        **extra_args: Any,
    ) -> sparsity.SparseState:
        if loss > 1:
            return sparse_state
        return super().update_state(sparse_state, params, grads, **extra_args)


class Often:
    def is_mask_update_iter(self, step: Any) -> Any:
        return step % 2 == 0

    def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
        return target_sparsities


def is_matrix(path: tuple[str, ...], param: jax.Array) -> bool:
    return param.ndim == 2


def type_of(path: tuple[str, ...], param: jax.Array) -> sparsity.SparsityType:
    return Rows() if path[-1] == "kernel" else sparsity.Unstructured()


own_sparsities = {"kernel": 0.25}
careful = Careful(
    scheduler=Often(),
    sparsity_distribution_fn=sparsity.Uniform(0.5, is_matrix, own_sparsities),
    sparsity_type=type_of,
    batch_axes=lambda path, param: 0,
)
tx = careful.wrap_optax(optax.sgd(0.1), masks=None)
opt_state = tx.init(params)
_, opt_state = tx.update(params, opt_state, params, loss=0.5)
state = sparsity.get_sparse_state(opt_state)
opt_state = sparsity.set_sparse_state(opt_state, state._replace(masks=state.masks))
rows: jax.Array = state.masks["kernel"]
masked: jax.Array = sparsity.apply_mask(params["kernel"], rows)
for layer in sparsity.reports.layer_summary(params, opt_state, careful):
    reached: bool = layer.target is None or layer.achieved >= layer.target
'''
# By names of files.
PROGRAMS = {re.sub(r"\W", "_", place): code for place, code in blocks("python").items()}
PROGRAMS["user"] = USER

# Mistakes of users, each on the last line, and the rules of the checker that they break.
MISTAKES = {
    "no_such_name": ("sparsity.MagnitudePrunning()", "reportAttributeAccessIssue"),
    "no_such_option": ("sparsity.MagnitudePruning(sparsity=0.5)", "reportCallIssue"),
    "a_wrong_option": ("sparsity.MagnitudePruning(skip_gradients='no')", "reportArgumentType"),
    "no_config": ("sparsity.create_updater_from_config()", "reportCallIssue"),
    "no_optimizer": ("sparsity.NoPruning().wrap_optax(0.1)", "reportArgumentType"),
}


STRICT = sorted((ROOT / "tests/typing").glob("*.py"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package, as where packages are installed."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sparsity", folder / "sparsity", ignore=ignored)
    return folder


def check_by_pyright(folder, installed, settings):
    """Yields (path, line, text, rule, message) of all errors of the programs in a folder."""
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    checker = [sys.executable, "-m", "basedpyright"]
    done = subprocess.run(
        [*checker, "--project", folder, "--pythonpath", sys.executable, "--outputjson"],
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    for error in json.loads(done.stdout)["generalDiagnostics"]:
        if error["severity"] == "error":
            path, start = Path(error["file"]), error["range"]["start"]
            text = path.read_text(encoding="utf-8").splitlines()[start["line"]]
            text = text[start["character"] :]
            yield path, start["line"] + 1, text, error.get("rule"), error["message"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory, installed):
    """(line, rule, message) of all errors of each program, by its name."""
    folder = tmp_path_factory.mktemp("programs")
    mistakes = {name: f"import sparsity\n{line}\n" for name, (line, _) in MISTAKES.items()}
    for name, program in (PROGRAMS | mistakes).items():
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
    by_name = {name: [] for name in PROGRAMS | mistakes}
    for path, line, _, rule, message in check_by_pyright(folder, installed, SETTINGS):
        by_name[path.stem].append((line, rule, message))
    return by_name


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_runs_has_no_type_errors(errors, name):
    assert not errors[name], "\n".join(
        f"{name}.py:{line}: {message} [{rule}]" for line, rule, message in errors[name]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, (_, rule) in MISTAKES.items()])
def test_a_mistake_is_a_type_error(errors, name, rule):
    assert [(line, found) for line, found, _ in errors[name]] == [(2, rule)]


@pytest.mark.slow
def test_the_program_of_a_user_runs():
    names = {"__name__": "user"}
    exec(compile(USER, "user.py", "exec"), names)
    assert names["total"] == 16 / 36


@pytest.mark.slow
def test_programs_of_users_pass_pyright_in_its_strict_mode(tmp_path, installed):
    for path in STRICT:
        shutil.copy(path, tmp_path)
    strict = SETTINGS | {"typeCheckingMode": "strict"}
    faults = check_by_pyright(tmp_path, installed, strict)
    assert [fault for fault in faults if not re.match(r"(jax|jnp|optax)\b", fault[2])] == []


@pytest.mark.slow
def test_programs_of_users_pass_mypy_in_its_strict_mode(tmp_path, installed):
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-optax.*]\nignore_missing_imports = true\n")
    checker = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    done = subprocess.run(
        [*checker, "--python-executable", sys.executable, *STRICT],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", STRICT, ids=[path.stem for path in STRICT])
def test_a_program_of_a_user_runs(path):
    with mock.patch.dict(sparsity.ALGORITHM_REGISTRY):
        runpy.run_path(str(path))
