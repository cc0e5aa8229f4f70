"""Refit of a block of layers: its kept weights are trained to the outputs of the dense block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.calibration.reuse import compile_at_call
from sparsity.core.arrays import promote
from sparsity.core.checks import check_function, check_int, check_kind, check_number
from sparsity.core.trees import Path, PyTree

Arrays: TypeAlias = list[jax.Array]
Weights: TypeAlias = Mapping[PyTree, jax.Array]  # by place
CallFn: TypeAlias = Callable[[Weights, Weights, Arrays], Arrays]

_NUM_TESTS = 8  # tests on held-out batches


class Batch(NamedTuple):
    """Values of a block for a batch.

    Attributes:
      call: `call(weights, others, inputs)` returns the outputs of the block.
      inputs: the values that enter the block.
      targets: the outputs of the dense block.
      row_weights: weights of the rows of each output, broadcastable to it, or `None`.
    """

    call: CallFn
    inputs: Arrays
    targets: Arrays
    row_weights: Sequence[jax.Array | None]

    def has_rows(self) -> bool:
        """Returns whether a row counts."""
        pairs = zip(self.targets, self.row_weights, strict=True)
        return any(y.size and (weights is None or np.any(weights)) for y, weights in pairs)


class Trained(NamedTuple):
    """Result of a refit: the weights, and the held-out errors before and after."""

    weights: dict[PyTree, jax.Array]
    before: float
    after: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRefit:
    """Trains the kept weights of each block to the outputs of the dense block.

    A block is a step of a scan over layers, or the parameters whose paths agree up to the first
    number; `blocks=` of `oneshot` names others. The loss is the squared error of all outputs of
    the block. Masks stay as the pruner chose them. The weights of the step with the smallest error
    on held-out batches stay, or those of the start if no step is better.

    Attributes:
      steps: number of steps for each block.
      learning_rate: of Adam, which decays by a cosine; ignored with an `optimizer`.
      rows: number of calibration batches a step; `None` for all.
      window: number of blocks in a row that are trained together.
      inputs: 'pruned' trains on what the pruned blocks before return, 'dense' on what the dense
        ones do.
      held: share of the batches that only choose the step; of a single batch nothing is held out.
      optimizer: any optax optimizer, made anew for each block.
      filter_fn: `filter_fn(path, array) -> bool` chooses parameters without a mask that are trained
        too, such as norms and biases; by default none.

    Raises:
      ValueError: a field is out of range.

    Source: the objective is that of arXiv 2510.14444.

    Example:
      >>> import sparsity
      >>> params = {"up": jnp.eye(4), "down": jnp.ones((4, 2))}
      >>> model = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
      >>> x = jax.random.normal(jax.random.key(0), (3, 8, 4))
      >>> pruner = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> refit = BlockRefit(steps=4)
      >>> pruned, masks, report = sparsity.oneshot(pruner, model, params, x, refit=refit)
      >>> all(after <= before for before, after in report.blocks.values())
      True
    """

    steps: int = 32
    learning_rate: float = 1e-3
    rows: int | None = 1
    window: int = 1
    inputs: Literal["pruned", "dense"] = "pruned"
    held: float = 0.125
    optimizer: optax.GradientTransformation | None = None
    filter_fn: Callable[[Path, PyTree], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "window", *(["rows"] if self.rows is not None else [])):
            check_int(name, getattr(self, name), 1)
        check_number("learning_rate", self.learning_rate, 0)
        check_number("held", self.held, 0)
        if self.held >= 1:
            raise ValueError(f"held must be below 1, got held = {self.held}.")
        if self.inputs not in ("pruned", "dense"):
            raise ValueError(f"inputs must be 'pruned' or 'dense', got inputs = {self.inputs!r}.")
        check_function("filter_fn", self.filter_fn, "(path, array)", optional=True)
        check_kind("optimizer", self.optimizer, optax.GradientTransformation | None, "an optimizer")

    def check(self, params: Mapping[Path, PyTree]) -> list[Path]:
        """Returns the parameters that `filter_fn` chooses, and tries the optimizer on shapes.

        Args:
          params: arrays or shapes by path.
        """
        shapes = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in params.items()}
        if self.optimizer is not None:
            jax.eval_shape(self.optimizer.init, shapes)
        return [path for path, array in params.items() if self.trains(path, array)]

    def trains(self, path: Path, array: jax.Array) -> bool:
        """Returns whether a parameter without a mask is trained."""
        is_inexact = jnp.issubdtype(array.dtype, jnp.floating)
        return self.filter_fn is not None and is_inexact and bool(self.filter_fn(path, array))

    def train(
        self, weights: Weights, masks: Weights, others: Weights, batches: Sequence[Batch]
    ) -> Trained:
        """Trains the weights of a block.

        Args:
          weights: the weights to train, by place.
          masks: the masks of some of them, by place.
          others: all other parameters that the block reads, by place.
          batches: batches, one or more; those of one `call` have one shape.
        """
        batches = [batch for batch in batches if batch.has_rows()]
        num_held = min(max(round(self.held * len(batches)), 1), len(batches) - 1)
        trained, held = batches[: len(batches) - num_held], batches[len(batches) - num_held :]
        trained, held = trained or held, held or trained
        masters = {key: x.astype(promote(x.dtype, jnp.float32)) for key, x in weights.items()}
        dtypes = {key: x.dtype for key, x in weights.items()}
        losses = _make_losses(dtypes, batches)
        optimizer = self.optimizer or optax.adam(
            optax.cosine_decay_schedule(self.learning_rate, self.steps)
        )

        def test(masters: Weights) -> float:
            sums = [losses[b.call][0](masters, masks, others, b[1:]) for b in held]
            lost, total = (sum(float(x[i]) for x in sums) for i in range(2))
            return lost / total if total else lost

        @compile_at_call
        def update(masters: Weights, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
            updates, state = optimizer.update(grads, state, masters)
            return optax.apply_updates(masters, updates), state

        best = before = test(masters)
        best_masters, state = masters, optimizer.init(masters)
        size = min(self.rows or len(trained), len(trained))
        for step in range(self.steps):
            chosen = [trained[(step * size + i) % len(trained)] for i in range(size)]
            grads = [losses[b.call][1](masters, masks, others, b[1:]) for b in chosen]
            mean = grads[0] if size == 1 else jax.tree.map(lambda *x: sum(x) / len(x), *grads)
            masters, state = update(masters, state, mean)
            if (step + 1) % max(self.steps // _NUM_TESTS, 1) == 0 or step + 1 == self.steps:
                error = test(masters)
                if error < best:
                    best, best_masters = error, masters
        return Trained(_apply_masks(dtypes, best_masters, masks), before, best)


def _make_losses(
    dtypes: Mapping[PyTree, PyTree], batches: Sequence[Batch]
) -> dict[CallFn, tuple[Callable[..., PyTree], Callable[..., PyTree]]]:
    """Returns, for each function of a block, its sums of squares and the gradient of its error."""

    def make(call: CallFn) -> tuple[Callable[..., PyTree], Callable[..., PyTree]]:
        def measure(masters: Weights, masks: Weights, others: Weights, batch: PyTree) -> PyTree:
            inputs, targets, row_weights = batch
            outputs = call(_apply_masks(dtypes, masters, masks), others, inputs)
            return sum_losses(outputs, targets, row_weights)

        def share(masters: Weights, masks: Weights, others: Weights, batch: PyTree) -> PyTree:
            lost, total = measure(masters, masks, others, batch)
            return lost / jnp.maximum(total, jnp.finfo(total.dtype).tiny)

        return compile_at_call(measure), compile_at_call(jax.grad(share))

    return {call: make(call) for call in dict.fromkeys(batch.call for batch in batches)}


def sum_losses(
    outputs: Arrays, targets: Arrays, row_weights: Sequence[jax.Array | None]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of |y - target|^2 and of |target|^2 over all arrays with fractions."""
    lost = total = jnp.float32(0)
    for y, target, weights in zip(outputs, targets, row_weights, strict=True):
        if jnp.issubdtype(y.dtype, jnp.inexact):
            dtype = promote(y.dtype, jnp.float32)
            y, target = y.astype(dtype), target.astype(dtype)
            scale = 1 if weights is None else weights.astype(jnp.float32)
            if weights is not None:  # rows that count nothing may be NaN
                y, target = jnp.where(scale > 0, y, 0), jnp.where(scale > 0, target, 0)
            lost += jnp.sum(jnp.square(jnp.abs(y - target)) * scale).astype(jnp.float32)
            total += jnp.sum(jnp.square(jnp.abs(target)) * scale).astype(jnp.float32)
    return lost, total


def _apply_masks(
    dtypes: Mapping[PyTree, PyTree], masters: Weights, masks: Weights
) -> dict[PyTree, jax.Array]:
    """Returns weights in the dtypes of their parameters, 0 outside their masks."""
    masked = {
        key: jnp.where(masks[key] != 0, x, 0) if key in masks else x for key, x in masters.items()
    }
    return {key: x.astype(dtypes[key]) for key, x in masked.items()}
