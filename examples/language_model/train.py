"""Prunes SmolLM2-135M block by block, and trains the kept weights to agree with the dense model.

python train.py           prunes into runs/language_model/pruned
python train.py finetune  trains the result into runs/language_model/tuned
python train.py table     prunes by every method, each in a process of its own
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import evaluate
import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
import texts
from safetensors.numpy import load_file, save_file
from tqdm import trange

import sparsity
from sparsity.calibration import BlockRefit

BLOCKS = BlockRefit(steps=64, learning_rate=2e-3)
METHODS: dict[str, tuple[type[sparsity.BaseUpdater], Any]] = {
    "magnitude": (sparsity.MagnitudePruning, None),
    "Wanda": (sparsity.WandaPruning, None),
    "SparseGPT": (sparsity.SparseGPTPruning, None),
    "Wanda, ADMM": (sparsity.WandaPruning, sparsity.ADMM()),
    "Wanda, BlockRefit": (sparsity.WandaPruning, BLOCKS),
    "Wanda, ADMM, BlockRefit": (sparsity.WandaPruning, (sparsity.ADMM(), BLOCKS)),
}
KINDS = {"50 %": 0.5, "60 %": 0.6, "2:4": 0.5}
CALIBRATION = (512, 8)  # tokens of a window, windows
TRAINING = (128, 2)  # the same, of a step


def prune(source: Path, batches: list[Any], method: str, kind: str, out: Path) -> Any:
    """Prunes the matrices of all layers of a Hugging Face folder into another folder."""
    algorithm, refit = METHODS[method]
    pruner = algorithm(
        sparsity_distribution_fn=sparsity.Uniform(
            KINDS[kind], filter_fn=lambda path, _: "proj" in path[-1]
        ),
        sparsity_type=sparsity.NByM(2, 4) if kind == "2:4" else sparsity.Unstructured(),
    )
    model = llama.make_model(evaluate.read_config(source))
    return sparsity.oneshot(pruner, model, source, batches, refit, out=out, held=(), progress=True)


def finetune(
    source: Path, pruned: Path, batches: np.ndarray, out: Path, learning_rate: float = 1e-4
) -> list[float]:
    """Trains the kept weights of a folder with tokens [steps, batch, length].

    The loss is the cross entropy plus the divergence from the dense model. Returns those of the
    steps.
    """
    model = llama.make_model(evaluate.read_config(source))
    dense, params = (evaluate.load_params(folder) for folder in (source, pruned))
    masks = load_file(pruned / "masks.safetensors")
    tx = sparsity.train_only(
        optax.adam(optax.cosine_decay_schedule(learning_rate, len(batches))), masks
    )

    def loss(params: llama.Params, expected: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = model(params, {"tokens": tokens})
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        divergence = optax.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(expected))
        return jnp.mean(entropy) + jnp.mean(divergence)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: llama.Params, state: Any, dense: llama.Params, tokens: jax.Array) -> Any:
        expected = model(dense, {"tokens": tokens})
        value, grads = jax.value_and_grad(loss)(params, expected, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for i in (bar := trange(len(batches), desc="finetune", unit="step")):
        params, state, value = step(params, state, dense, batches[i])
        losses.append(float(value))
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    shutil.copytree(
        pruned, out, dirs_exist_ok=True, ignore=lambda *_: ["model.safetensors", "journal.jsonl"]
    )
    arrays = {name: np.asarray(array) for name, array in params.items()}
    save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
    return losses


def run(source: Path, command: str, options: argparse.Namespace) -> None:
    """Prunes or trains, and writes what it took and what the result is to OUT.json."""
    tokenizer, manual = evaluate.read_tokenizer(source), texts.read_manual()
    out, started = options.run_dir / options.name, time.process_time()
    measured: dict[str, Any] = {}
    if command == "prune":
        windows = texts.split_tokens(tokenizer, manual, *CALIBRATION)
        batches = [{"tokens": tokens[None]} for tokens in windows]
        prune(source, batches, options.method, options.kind, out)
        measured = {"method": options.method, "kind": options.kind}
    else:
        length, size = TRAINING
        windows = texts.split_tokens(tokenizer, manual, length, size * options.steps)
        windows = np.random.default_rng(0).permutation(windows)
        batches = windows.reshape(-1, size, length)
        finetune(source, options.run_dir / "pruned", batches, out)
    measured |= {"seconds": time.process_time() - started, "peak": read_peak()}
    measured |= evaluate.describe(source, out)
    out.with_name(f"{out.name}.json").write_text(json.dumps(measured, indent=1))
    print(json.dumps(measured, indent=1))


def read_peak() -> float:
    """Returns the largest memory of this process so far, in MB, as Linux counts it."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) / 1e3


def make_table(source: Path, run_dir: Path) -> None:
    """Prunes by every method to every kind, and writes table.md and pictures."""
    import report  # loads matplotlib, which the memory of a row leaves out

    rows = [{"method": "dense", "kind": "", **evaluate.describe(source, source)}]
    for kind, method in itertools.product(KINDS, METHODS):
        name = f"{kind}_{method}".translate(dict.fromkeys(map(ord, " ,%:")))
        file = run_dir / f"{name}.json"
        if not file.exists():  # each in a process of its own, which has a peak of its own
            options = ["--method", method, "--kind", kind, "--name", name]
            subprocess.run(
                [sys.executable, __file__, *options, "--run_dir", str(run_dir)], check=True
            )
            shutil.rmtree(run_dir / name)
        rows.append(json.loads(file.read_text()))
    report.write(rows, run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = ["prune", "finetune", "table"]
    parser.add_argument("command", nargs="?", default="prune", choices=commands)
    parser.add_argument("--method", default="Wanda, ADMM", choices=METHODS)
    parser.add_argument("--kind", default="50 %", choices=KINDS)
    parser.add_argument("--steps", type=int, default=100, help="of the fine-tuning")
    parser.add_argument("--run_dir", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--name", help="of the folder that is written")
    options = parser.parse_args()
    options.name = options.name or {"finetune": "tuned"}.get(options.command, "pruned")
    source = options.run_dir / "dense"
    if not (source / "model.safetensors").exists():  # another process: its memory does not count
        subprocess.run([sys.executable, llama.__file__, str(source)], check=True)
    if options.command == "table":
        make_table(source, options.run_dir)
    else:
        run(source, options.command, options)


if __name__ == "__main__":
    main()
