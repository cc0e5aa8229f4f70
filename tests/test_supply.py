"""The package opens no network connection, runs no text as code, and reads no pickles."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import sparsity
from tests.helpers import ROOT

SOURCES = sorted(pathlib.Path(sparsity.__file__).parent.rglob("*.py"))

# Fails at the first socket or look-up of a name, during imports or a run.
PROGRAM = """
import socket

def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")

class NoSocket(socket.socket):
    __init__ = refuse

socket.socket = NoSocket
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
try:
    socket.socket()
except AssertionError as error:
    print(error)

import jax.numpy as jnp
import optax
import sparsity
import sparsity.cli

params = {"w": jnp.arange(1.0, 9.0).reshape(2, 4)}
pruner = sparsity.MagnitudePruning(
    sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
)
tx = pruner.wrap_optax(optax.sgd(0.0))
opt_state = tx.init(params)
for _ in range(2):
    updates, opt_state = tx.update(params, opt_state, params)
    params = optax.apply_updates(params, updates)
print(params["w"].ravel().tolist())
"""


@pytest.mark.slow
def test_importing_and_pruning_open_no_socket():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.splitlines() == [
        "the network was asked for",
        "[0.0, 0.0, 0.0, 0.0, 5.0, 6.0, 7.0, 8.0]",
    ], done.stderr


# Run text as code, or read files that name what is to be run.
CODE_FROM_TEXT = {"eval", "exec", "compile", "__import__"}
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
}
NETWORK_MODULES = {"socket", "ssl", "urllib", "http", "requests", "httpx", "aiohttp", "ftplib"}


def breaches(source):
    """Lines that run text, import modules of pickles or of the network, or allow pickles."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        unsafe = any(
            name.partition(".")[0] in UNSAFE_MODULES | NETWORK_MODULES for name in imported
        )
        if isinstance(node, ast.Name):
            unsafe = node.id in CODE_FROM_TEXT
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            unsafe = not (isinstance(node.value, ast.Constant) and node.value.value is False)
        if unsafe:
            lines.append(node.lineno if hasattr(node, "lineno") else node.value.lineno)
    return lines


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "run = exec",
        "import pickle",
        "from urllib.request import urlopen",
        "import http.client as client",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=allowed)",
    ],
)
def test_a_breach_is_noticed(line):
    assert breaches(f"x = 1\n{line}\n") == [2]


def test_the_package_runs_no_text_and_reads_no_pickles():
    lines = {path: breaches(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(lines) > 50
    assert {path: each for path, each in lines.items() if each} == {}
