"""A small vision transformer becomes sparse in kauldron's Trainer and resumes from a checkpoint."""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # kauldron logs with TensorFlow

import jax
import numpy as np
import optax
from kauldron import kd
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import sparsity
from sparsity import sparsity_distributions

LOWEST_ACCURACY = 0.9


class Digits:
    """1,437 digits of 8 x 8 pixels to train with, or 360 to test with; they come with sklearn."""

    def __init__(self, *, test: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
        split = train_test_split(images, labels.astype(np.int32), test_size=360, random_state=0)
        self.images, self.labels = split[1::2] if test else split[::2]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"image": self.images[index], "label": self.labels[index, None]}


def make_model() -> kd.nn.Vit:
    encoder = kd.nn.VitEncoder.from_spec(
        hidden_size=64, num_layers=2, mlp_size=128, num_heads=4, patch_size=2
    )
    return kd.nn.Vit(encoder=encoder, num_classes=10, image="batch.image")


def make_pruner(steps: int) -> sparsity.BaseUpdater:
    """Prunes four of five weights of every kernel but that of the classifier."""
    return sparsity.MagnitudePruning(
        sparsity_distribution_fn=functools.partial(
            sparsity_distributions.uniform,
            sparsity=0.8,
            filter_fn=lambda path, _: path[-1] == "kernel" and path[0] != "classifier_head",
        ),
        scheduler=sparsity.PolynomialSchedule(10, steps // 5, steps * 4 // 5),
    )


def make_channel_pruner(steps: int) -> sparsity.BaseUpdater:
    """Prunes whole channels, heads and hidden units until half of the multiply-adds are left."""
    model, images = make_model(), Digits(test=True).images[:1]
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    graph = sparsity.trace(functools.partial(compute_logits, model), params, images)
    return sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph),
        sparsity_distribution_fn=sparsity.budget(graph, macs=0.5),
        scheduler=sparsity.PolynomialSchedule(10, steps // 5, steps * 4 // 5),
    )


def compute_logits(model: kd.nn.Vit, params: Any, images: np.ndarray) -> jax.Array:
    return model.apply({"params": params}, images)["logits"]


def make_trainer(workdir: str, pruner: sparsity.BaseUpdater, steps: int) -> kd.train.Trainer:
    tx = optax.adamw(optax.cosine_decay_schedule(2e-3, steps))
    tx = pruner.wrap_optax(tx)
    predictions = {"logits": "preds.logits", "labels": "batch.label"}
    return kd.train.Trainer(
        seed=0,
        workdir=workdir,
        train_ds=kd.data.py.DataSource(
            data_source=Digits(test=False), shuffle=True, batch_size=64, num_workers=0
        ),
        model=make_model(),
        train_losses={"xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(**predictions)},
        optimizer=tx,
        num_train_steps=steps,
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=steps // 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of training")
    parser.add_argument("--workdir", help="keep checkpoints here; a second start resumes from them")
    options = parser.parse_args()
    pruner = make_pruner(options.steps)
    make = functools.partial(make_trainer, pruner=pruner, steps=options.steps)
    channels = make_channel_pruner(options.steps)
    with tempfile.TemporaryDirectory() as folder:
        # Every Trainer compiles the same program; this keeps it for the next one.
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        trainer = make(options.workdir or f"{folder}/first")
        state, _ = trainer.train()
        check(state, trainer.model, pruner)
        if not options.workdir:
            check_resume(functools.partial(make, f"{folder}/second"), options.steps, state)
        trainer = make_trainer(f"{options.workdir or folder}/channels", channels, options.steps)
        state, _ = trainer.train()
        check_smaller(state, trainer.model, channels.scope.graph)


def check_resume(make: Callable[[], kd.train.Trainer], steps: int, expected: Any) -> None:
    """Stops during the ramp, resumes from the checkpoint, and compares with `expected`."""
    make().replace(stop_after_steps=steps * 3 // 5).train()
    trainer = make()
    print(f"going on from the checkpoint of step {trainer.checkpointer.latest_step}")
    state, _ = trainer.train()
    for name in ("params", "opt_state"):  # the masks are part of the second
        pairs = jax.tree.map(np.array_equal, getattr(state, name), getattr(expected, name))
        if not jax.tree.all(pairs):
            sys.exit(f"error: {name} differ from those of the run that was not stopped")
    print("weights, masks and optimizer state equal those of the run that was not stopped")


def check(state: Any, model: Any, pruner: sparsity.BaseUpdater) -> None:
    """Prints what was reached; ends the program if it is not what it should be."""
    for layer in sparsity.reports.layer_summary(state.params, state.opt_state, pruner):
        if layer.target is not None:
            print(f"{layer.path:52} target {layer.target:.4f} zeros {layer.achieved:.4f}")
            wrong = abs(layer.achieved - layer.target) * math.prod(layer.shape)
            if wrong > 0.51:  # a mask keeps a whole number of weights; float32 rounds the target
                sys.exit(f"error: {layer.path} has {wrong:.0f} wrong zeros")
    check_accuracy(functools.partial(compute_logits, model, state.params))


def check_smaller(state: Any, model: Any, graph: sparsity.Graph) -> None:
    """Cuts the masked channels, and prints what that saves; ends the program as `check` does."""
    masks = sparsity.get_sparse_state(state.opt_state).masks
    small = sparsity.shrink(graph, state.params, masks)
    images = Digits(test=True).images
    print(small.report({"inference of 360 images": small.measure(state.params, images)}))
    smaller = functools.partial(small.apply, small.params)
    masked = compute_logits(model, state.params, images)
    if (error := np.max(np.abs(smaller(images) - masked))) > 1e-4:
        sys.exit(f"error: logits of the smaller network differ by {error:.1e}")
    check_accuracy(smaller)


def check_accuracy(predict: Callable[[np.ndarray], jax.Array]) -> None:
    test = Digits(test=True)
    accuracy = np.mean(np.argmax(predict(test.images), -1) == test.labels)
    print(f"test accuracy {accuracy:.1%}")
    if accuracy < LOWEST_ACCURACY:
        sys.exit(f"error: the accuracy should be at least {LOWEST_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
