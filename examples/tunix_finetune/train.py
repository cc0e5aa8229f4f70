"""Fine-tunes a small Llama with tunix: all weights, adapters, chosen entries, whole channels."""

from __future__ import annotations

import argparse
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from flax import nnx
from tunix.sft import peft_trainer

import sparsity

sys.path.append(str(Path(__file__).parents[1] / "tunix_lm"))

from tiny_llama import (
    ALPHA,
    RANK,
    CompactModel,
    add_adapters,
    batches,
    load_text,
    make_call,
    make_model,
    model_input,
    num_weights,
    read_adapters,
)

CHANNELS = 21  # of 256 in each feed-forward layer, about as many entries as the adapters have
RATES = {"full": 1e-3, "channels": 3e-3}  # others have RATE
RATE = 5e-3
ROUNDS = 7  # of measured steps


class Run(NamedTuple):
    """A way to fine-tune.

    Attributes:
      model: the module that the trainer trains.
      wrap: wraps the optimizer.
      read: returns the weights of the Llama, adapters merged, from the trained module.
      values: number of values that the optimizer trains.
    """

    model: nnx.Module
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    read: Callable[[nnx.Module], nnx.State]
    values: int


class Row(NamedTuple):
    """Holds the measures of a run, those of `COLUMNS`."""

    values: float
    bits: float
    bits_before: float
    megabytes: float
    megabytes_short: float
    milliseconds: float
    file_bytes: float


COLUMNS = (
    "values",
    "bits, code",
    "bits, help texts",
    "step, MB",
    "short line, MB",
    "step, ms",
    "file, bytes",
)


def load_code() -> tuple[np.ndarray, np.ndarray]:
    """Returns a module of the standard library as ASCII codes: to train with, and to test with."""
    text = Path(tarfile.__file__).read_text("utf-8").encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    return codes[:-20_000], codes[-20_000:]


def make_trainer(
    model: nnx.Module, tx: optax.GradientTransformation, name: str, steps: int
) -> peft_trainer.PeftTrainer:
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=steps, max_steps=steps, pbar_description=name
    )
    trainer = peft_trainer.PeftTrainer(model, tx, config)
    return trainer.with_gen_model_input_fn(model_input)


def pretrain(steps: int) -> nnx.State:
    """Returns the weights of a Llama that was trained on the help texts of Python."""
    model = make_model()
    tx = optax.adamw(optax.cosine_decay_schedule(2e-3, steps))
    make_trainer(model, tx, "help texts", steps).train(batches(load_text()[0], steps, seed=1))
    return nnx.state(model, nnx.Param)


def load_model(weights: nnx.State) -> nnx.Module:
    model = make_model()
    nnx.update(model, jax.tree.map(jnp.copy, weights))
    return model


class Llama:
    """The model as functions of its weights, compiled once."""

    def __init__(self) -> None:
        fn, weights, call = make_call()
        self._fn, self.graph = fn, sparsity.trace(fn, weights, *call)
        # An output keeps all its channels: S2FT trains no channels of the residual stream.
        self.blocks = sparsity.trace(
            lambda weights, *call: (fn(weights, *call), weights["final_norm"]["w"][...]),
            weights,
            *call,
        )
        self.loss, self.differentiate = jax.jit(self._loss), jax.jit(jax.grad(self._loss))

    def measure_bits(self, weights: nnx.State, codes: np.ndarray) -> float:
        """Returns the bits that a character of a text takes."""
        losses = [self.loss(weights, batch) for batch in batches(codes, 10, seed=2)]
        return float(np.mean(losses) / np.log(2))

    def choose(self, weights: nnx.State, entries: int, seed: int) -> tuple[nnx.State, nnx.State]:
        """Returns masks of the largest gradients over some batches: of entries, of channels."""
        texts = batches(load_code()[0], 4, seed + 100)
        grads = [self.differentiate(weights, batch) for batch in texts]
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *grads)
        by_entry = sparsity.Uniform(
            entries=entries, filter_fn=lambda path, w: path[0] == "layers" and w.ndim > 1
        )
        by_channel = sparsity.Uniform(1 - CHANNELS / 256, filter_fn=lambda path, _: "mlp" in path)
        choosers = (
            sparsity.MagnitudePruning(sparsity_distribution_fn=by_entry),
            sparsity.MagnitudePruning(
                sparsity_distribution_fn=by_channel, scope=sparsity.Coupled(self.blocks, order=2)
            ),
        )
        by_entry, by_channel = (each.instant_sparsify(mean)[1] for each in choosers)
        return by_entry, by_channel

    def _loss(self, weights: nnx.State, batch: peft_trainer.TrainingInput) -> jax.Array:
        inputs = model_input(batch)
        logits, _ = self._fn(
            weights, inputs["input_tokens"], inputs["positions"], None, inputs["attention_mask"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), batch.input_tokens[:, 1:]
        )
        return losses.mean()


def make_runs(llama: Llama, weights: nnx.State, seed: int) -> dict[str, Run]:
    """Returns the ways to fine-tune, each with a model of its own."""

    def identity(tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return tx

    def read_dense(model: nnx.Module) -> nnx.State:
        return nnx.state(model, nnx.Param)

    def merge(model: nnx.Module) -> nnx.State:
        no_masks = jax.tree.map(lambda _: None, weights)
        return sparsity.merge_lora(weights, read_adapters(model), no_masks, scale=ALPHA / RANK)

    def read_compact(model: CompactModel) -> nnx.State:
        compact, values = model.read()
        return compact.dense(values)

    def freeze(masks: nnx.State) -> Run:
        compact = sparsity.compact(llama.graph, weights, masks, outside="frozen")
        return Run(CompactModel(compact, trains_dense=False), identity, read_compact, count(masks))

    def count(masks: nnx.State) -> int:
        return sum(int(mask.sum()) for mask in jax.tree.leaves(masks))

    adapted = add_adapters(load_model(weights), seed)
    adapters = num_weights(nnx.state(adapted, nnx.LoRAParam))
    entries, channels = llama.choose(weights, adapters, seed)

    def only(tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return sparsity.train_only(tx, entries)

    return {
        "full": Run(load_model(weights), identity, read_dense, num_weights(weights)),
        "LoRA": Run(adapted, identity, merge, adapters),
        "train_only": Run(load_model(weights), only, read_dense, count(entries)),
        "compact": freeze(entries),
        "channels": freeze(channels),
    }


def measure_file(name: str, run: Run, weights: nnx.State, tuned: nnx.State) -> int:
    """Returns the bytes of what a run stores: all weights, adapters, or a delta."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        if name in ("full", "LoRA"):
            kind = nnx.Param if name == "full" else nnx.LoRAParam
            leaves = jax.tree.leaves(nnx.state(run.model, kind))
            arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
            safetensors.numpy.save_file(arrays, path)
        else:
            delta = sparsity.Delta.between(weights, tuned)
            delta.save(path)
            for leaf, again in zip(
                *map(jax.tree.leaves, (tuned, delta.apply(weights))), strict=True
            ):
                np.testing.assert_array_equal(leaf, again)
        return path.stat().st_size


def fine_tune(llama: Llama, weights: nnx.State, steps: int, seed: int) -> dict[str, Row]:
    """Returns the rows of one seed; times are measured in turn, after all runs."""
    runs, trained, programs, rows = make_runs(llama, weights, seed), {}, {}, {}
    batch = next(batches(load_code()[0], 1, seed))
    short = peft_trainer.TrainingInput(
        input_tokens=batch.input_tokens[:1, :8], input_mask=batch.input_mask[:1, :8]
    )
    for name, run in runs.items():
        rate = optax.cosine_decay_schedule(RATES.get(name, RATE), steps)
        trainer = make_trainer(run.model, run.wrap(optax.adam(rate)), name, steps)
        trainer.train(batches(load_code()[0], steps, seed))
        trained[name] = run.read(run.model)
        step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
        megabytes = [count_megabytes(step, trainer, each) for each in (batch, short)]
        rows[name] = Row(
            values=run.values,
            bits=llama.measure_bits(trained[name], load_code()[1]),
            bits_before=llama.measure_bits(trained[name], load_text()[1]),
            megabytes=megabytes[0],
            megabytes_short=megabytes[1],
            milliseconds=0.0,
            file_bytes=measure_file(name, run, weights, trained[name]),
        )
        programs[name] = step, trainer
    for name, seconds in measure_steps(programs, batch).items():
        rows[name] = rows[name]._replace(milliseconds=1000 * seconds)
    return rows


def count_megabytes(
    step: Any, trainer: peft_trainer.PeftTrainer, batch: peft_trainer.TrainingInput
) -> float:
    """Returns the megabytes of a compiled step: arguments and temporaries."""
    program = step.lower(trainer.model, trainer.optimizer, batch).compile()
    memory = program.memory_analysis()
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6


def measure_steps(
    programs: dict[str, tuple[Any, peft_trainer.PeftTrainer]], batch: peft_trainer.TrainingInput
) -> dict[str, float]:
    """Returns median seconds of compiled steps, which are measured in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS + 1):  # the first one compiles
        for name, (step, trainer) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(step(trainer.model, trainer.optimizer, batch))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def check(rows: dict[str, Row], bits: float) -> None:
    """Ends the program if a run learned nothing, or two runs of equal entries differ."""
    for name, row in rows.items():
        if not row.bits < bits - 0.1:
            sys.exit(f"error: {name} has {row.bits:.3f} bits, the model before {bits:.3f}")
    if abs(rows["train_only"].bits - rows["compact"].bits) > 0.02:
        sys.exit("error: train_only and the frozen model trained the same entries differently")


def print_table(seeds: list[dict[str, Row]], before: tuple[float, float]) -> None:
    """Prints medians over the seeds, and the spread of the bits."""
    print(f"before: {before[0]:.3f} bits per character of code, {before[1]:.3f} of the help texts")
    print(f"{'':12}", *(f"{name:>18}" for name in COLUMNS))
    for name in seeds[0]:
        columns = [[getattr(rows[name], field) for rows in seeds] for field in Row._fields]
        shown = []
        for column, digits in zip(columns, (0, 3, 3, 1, 1, 1, 0), strict=True):
            spread = f" ± {(max(column) - min(column)) / 2:.3f}" if digits == 3 else ""
            shown.append(f"{statistics.median(column):,.{digits}f}{spread}")
        print(f"{name:12}", *(f"{text:>18}" for text in shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="steps of fine-tuning")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    options = parser.parse_args()
    llama, weights = Llama(), pretrain(2 * options.steps)
    before = tuple(llama.measure_bits(weights, text()[1]) for text in (load_code, load_text))
    seeds = []
    for seed in range(options.seeds):
        seeds.append(fine_tune(llama, weights, options.steps, seed))
        print_table(seeds, before)
        check(seeds[-1], before[0])


if __name__ == "__main__":
    main()
