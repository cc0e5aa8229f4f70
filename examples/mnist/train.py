"""Trains a small network on real images, dense and sparse side by side, and compares the two.

A stopped run resumes from its last checkpoint and ends with the same bits as an uninterrupted one:
a step depends on the checkpoint and the configuration alone.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from tqdm import tqdm

import sparsity
from examples.mnist import compacting, config as config_lib, data, moves, shrinking
from examples.mnist.checkpoint import Checkpoint, Checkpoints
from examples.mnist.network import Model, Network, TrainState, make_model, make_network
from sparsity import sparsity_types


class Experiment(NamedTuple):
    """Networks with the same initial weights, by role ('dense', 'sparse'), and what they learn."""

    networks: dict[str, Network]
    train: data.Digits
    test: data.Digits
    config: ConfigDict
    num_steps: int
    eval_every: int
    cut_step: int | None  # the first step of the smaller network
    compact: compacting.Stage | None  # the compact part of the run


class RunState(NamedTuple):
    """All arrays that change in a run."""

    trained: dict[str, Any]  # a TrainState, or a CompactState, for each role
    moves: moves.Moves  # of the sparse network's masks


def make_experiment(config: ConfigDict, data_dir: str | None = None) -> Experiment:
    """Returns all that is needed to train.

    Raises:
      ValueError: a value of the configuration makes no sense or does not fit the network, or the
        data cannot be read.
    """
    config_lib.check(config)
    train, test = data.load(data_dir)
    epoch = len(train.labels) // config.batch_size
    if not epoch:
        raise ValueError(
            f"--config.batch_size must be at most {len(train.labels)}, the number of images to "
            f"train with, got {config.batch_size}."
        )
    num_steps = config.epochs * epoch
    models = {
        "dense": make_model(config.seed, {}),
        "sparse": make_model(config.seed, dict(config.activations or ())),
    }
    updater = make_updater(config, num_steps, models["sparse"])
    updaters = {"dense": sparsity.NoPruning(), "sparse": updater}
    names = {"dense": "dense", "sparse": config.sparsity.algorithm}
    networks = {
        role: make_network(names[role], model, updaters[role], config, num_steps)
        for role, model in models.items()
    }
    cut_step = shrinking.cut_step(updater) if config.shrink else None
    sparse = networks["sparse"]
    stage = compacting.make_stage(sparse, config, num_steps) if config.compact else None
    eval_every = config.eval_every or epoch
    return Experiment(networks, train, test, config, num_steps, eval_every, cut_step, stage)


def make_updater(config: ConfigDict, num_steps: int, model: Model) -> sparsity.BaseUpdater:
    """Returns the algorithm that the configuration names."""
    options = config.sparsity.to_dict()
    strategy = options.pop("strategy")
    if options["algorithm"] == "epoch_strategy":
        return make_epoch_strategy(config, strategy or (), num_steps // config.epochs)
    if options["update_start_step"] is None:
        options["update_start_step"] = num_steps // 5
    if options["update_end_step"] is None:
        options["update_end_step"] = max(num_steps * 3 // 5, options["update_start_step"])
    smaller = config.shrink or config.compact  # needs a step
    if options["update_end_step"] >= num_steps - smaller:
        raise ValueError(
            f"update_end_step must come before the end of training after {num_steps} steps, got "
            f"{options['update_end_step']}."
        )
    kind = sparsity_types.parse_sparsity_type(options["sparsity_type"])
    if options["scope"] == "coupled" and options["sparsity"] is options["macs"] is None:
        options["macs"] = 0.25
    if options["sparsity"] is options["macs"] is None:
        options["sparsity"] = 1 - kind.n / kind.m if isinstance(kind, sparsity.NByM) else 0.9
    if kind != sparsity.Unstructured():  # the first and the last layer stay dense
        options["filter_fn"] = lambda path, param: path[0] in ("conv2", "hidden") and param.ndim > 1
    return sparsity.create_updater_from_config(shrinking.read_options(options, model))


def make_epoch_strategy(
    config: ConfigDict, strategy: tuple[Any, ...], steps_per_epoch: int
) -> sparsity.EpochStrategy:
    """Returns the updater that follows the strategy of the configuration."""
    epochs = [entry[0] for entry in strategy if len(entry) == 3]
    if (
        not epochs
        or len(epochs) < len(strategy)
        or not 0 < min(epochs) <= max(epochs) < config.epochs
    ):
        raise ValueError(
            "--config.sparsity.strategy must be ((epoch, method, density or pattern), ...) with "
            f"epochs between 0 and {config.epochs}, got {strategy!r}."
        )
    entries = {e: {"method": method, "prune_rate_pattern": p} for e, method, p in strategy}
    packed = config.sparsity.use_packed_masks
    return sparsity.EpochStrategy(entries, steps_per_epoch, use_packed_masks=packed)


def start(experiment: Experiment) -> Checkpoint:
    """Returns where a run begins; raises a ValueError if it has masks that cannot move."""
    trained = {role: network.init() for role, network in experiment.networks.items()}
    moved = moves.start(experiment.networks["sparse"], trained["sparse"])
    stage, config = experiment.compact, experiment.config
    if stage and not stage.step:
        state = compacting.compact(stage.graph, trained["sparse"], moved.active)
        batch = data.batch(experiment.train, config.batch_size, config.seed, 0)
        compacting.check_moves(stage, state, batch, config.sparsity.algorithm)
    history = {kind: [] for kind in ("evaluations", "mask_updates", "cuts", "compactions")}
    return Checkpoint(0, RunState(trained, moved), history)


def make_template(
    experiment: Experiment, history: dict[str, list[Any]], arrays: dict[str, np.ndarray]
) -> RunState:
    """Returns a state of the structure and shapes that a run has after a history.

    Args:
      experiment: the networks.
      history: what was measured in the run.
      arrays: arrays of the run by name; the masks give the shapes of a compact network.
    """
    state = start(after_changes(experiment, history)).state
    for row in history["compactions"]:
        masks = jax.tree.map_with_path(
            lambda path, _: arrays[f".moves.active{jax.tree_util.keystr(path)}"], state.moves.active
        )
        graph, masked = experiment.compact.graph, state.trained["sparse"]
        state.trained["sparse"] = compacting.compact(graph, masked, masks, row["formats"])
    return state


def after_changes(experiment: Experiment, history: dict[str, list[Any]]) -> Experiment:
    """Returns the experiment with the smaller or the compact network, if a history has one."""
    networks, config, num_steps = experiment.networks, experiment.config, experiment.num_steps
    for row in history["cuts"]:
        plan = sparsity.Plan.from_json(row["plan"])
        smaller = shrinking.make_smaller(networks["sparse"], plan, config, num_steps)
        networks = networks | {"sparse": smaller}
    if history["compactions"]:
        networks = networks | {"sparse": experiment.compact.network}
    return experiment._replace(networks=networks)


def change_network(
    experiment: Experiment, step: int, state: RunState, history: dict[str, list[Any]]
) -> RunState:
    """Returns the state of the network that takes over at a step; the history gets a row."""
    sparse, masked = experiment.networks["sparse"], state.trained["sparse"]
    if step == experiment.cut_step:
        plan = shrinking.make_plan(sparse, masked)
        history["cuts"].append({"step": step, "plan": plan.to_json()})
        smaller = after_changes(experiment, history).networks["sparse"]
        trained = state.trained | {"sparse": shrinking.cut(sparse, masked, plan, smaller)}
        return RunState(trained, moves.start(smaller, trained["sparse"]))
    masks = moves.active_masks(sparse, masked)
    compact = compacting.compact(experiment.compact.graph, masked, masks)
    formats = compacting.formats_by_name(compact.model)
    history["compactions"].append({"step": step, "formats": formats})
    return state._replace(trained=state.trained | {"sparse": compact})


def fit(
    experiment: Experiment,
    begin: Checkpoint,
    checkpoints: Checkpoints | None = None,
    board: Any = None,
) -> Checkpoint:
    """Trains all networks on the same images, from `begin` to the end.

    Args:
      experiment: the networks and their data.
      begin: where to go on.
      checkpoints: where to save, if at all.
      board: a `tensorboard.Board`, if events are wanted.
    """
    networks, config = after_changes(experiment, begin.history).networks, experiment.config
    num_steps, stage = experiment.num_steps, experiment.compact
    trained, moved = dict(begin.state.trained), begin.state.moves
    history = {kind: list(rows) for kind, rows in begin.history.items()}
    losses: dict[str, list[jax.Array]] = {role: [] for role in networks}
    sparse = networks["sparse"]
    stored = sparsity.get_sparse_state(trained["sparse"].opt_state).masks
    stores_masks = bool(stage or jax.tree.leaves(stored))
    change_steps = {experiment.cut_step, stage.step if stage else None}
    interval = 0.2 if sys.stderr.isatty() else 5  # seconds between two updates of the bar
    bar = tqdm(total=num_steps, initial=begin.step, unit="step", mininterval=interval)
    for step in range(begin.step, num_steps):
        if step in change_steps:
            state = RunState(trained, moved)
            trained, moved = change_network(experiment, step, state, history)
            networks = after_changes(experiment, history).networks
            sparse = networks["sparse"]
        batch = data.batch(experiment.train, config.batch_size, config.seed, step)
        for role, network in networks.items():
            trained[role], loss = network.step_at(step)(trained[role], batch)
            losses[role].append(loss)
        bar.update()
        is_evaluated = (step + 1) % experiment.eval_every == 0 or step + 1 == num_steps
        if isinstance(sparse.updater, sparsity.EpochStrategy):  # right after each pruning, too
            is_evaluated |= sparse.updater.scheduler.is_mask_update_iter(step)
        # Masks that every step makes are examined when the network is evaluated.
        is_update = sparse.updater.scheduler.is_mask_update_iter(step)
        if jax.tree.leaves(moved) and (is_update if stores_masks else is_evaluated):
            moved, row = moves.look(moved, sparse, sparse.view(trained["sparse"]))
            history["mask_updates"].append({"step": step + 1} | row)
            if board:
                board.write_mask_update(history["mask_updates"][-1], moved)
        if is_evaluated:
            views = {role: network.view(trained[role]) for role, network in networks.items()}
            row = {"step": step + 1} | evaluate(networks, views, losses, experiment.test)
            history["evaluations"].append(row)
            losses = {role: [] for role in networks}
            if board:
                board.write_evaluation(row, networks, views)
            if checkpoints:
                checkpoints.save(Checkpoint(step + 1, RunState(trained, moved), history))
            show(bar, row)
    bar.close()
    return Checkpoint(num_steps, RunState(trained, moved), history)


def evaluate(
    networks: dict[str, Network],
    trained: dict[str, TrainState],
    losses: dict[str, list[jax.Array]],
    test: data.Digits,
) -> dict[str, Any]:
    """Returns, for each network, mean loss of the last steps, accuracy and sparsity."""
    rows = {}
    for role, network in networks.items():
        summary = sparsity.summarize_sparsity(network.used_params(trained[role]))
        rows[role] = {
            "loss": float(jnp.stack(losses[role]).mean()),
            "accuracy": network.accuracy(trained[role], test),
            "sparsity": summary["_total_sparsity"],
            "layers": {name: value for name, value in summary.items() if name[0] != "_"},
        }
    return rows


def show(bar: tqdm, row: dict[str, Any]) -> None:
    """Puts an evaluation behind the progress bar."""
    dense, sparse = row["dense"], row["sparse"]
    bar.set_postfix_str(
        f"loss {sparse['loss']:.4f} (dense {dense['loss']:.4f}), "
        f"accuracy {sparse['accuracy']:.1%} ({dense['accuracy']:.1%}), "
        f"sparsity {sparse['sparsity']:.1%}",
        refresh=False,
    )


class Run(NamedTuple):
    """A run that is ready to begin or to go on."""

    experiment: Experiment
    begin: Checkpoint
    checkpoints: Checkpoints
    board: Any


def prepare(options: config_lib.Options) -> Run:
    """Returns the run that the options ask for; raises a ValueError for whatever is wrong.

    The old run in the folder is not touched before all else is known to be right.
    """
    experiment = make_experiment(options.config, options.data_dir)
    begin = start(experiment)
    data_dir = options.data_dir and str(Path(options.data_dir).resolve())
    identity = {"data_dir": data_dir, "config": options.config.to_dict()}
    identity = json.loads(json.dumps(identity, default=repr))
    checkpoints = Checkpoints(options.run_dir, identity, options.restart)
    try:
        restored = checkpoints.restore(functools.partial(make_template, experiment))
    except ValueError:
        checkpoints.close()
        raise
    begin = restored or begin
    if begin.step:
        print(f"Going on after step {begin.step} in {options.run_dir}", file=sys.stderr)
    board = None
    if options.tensorboard:
        from examples.mnist.tensorboard import Board

        board = Board(options.run_dir / "tensorboard", begin.step)
    return Run(experiment, begin, checkpoints, board)


def finish(experiment: Experiment, end: Checkpoint, folder: Path) -> None:
    """Prints the results and draws them."""
    from examples.mnist import plots, report  # matplotlib takes a while to load

    networks, trained = after_changes(experiment, end.history).networks, end.state.trained
    batch = data.batch(experiment.train, experiment.config.batch_size, seed=0, step=0)
    steps = [*zip(networks.values(), trained.values(), strict=True)]
    if end.history["compactions"]:
        masked = compacting.masked_state(networks["sparse"], trained["sparse"])
        trained = trained | {"sparse": masked}
        steps.append((experiment.networks["sparse"]._replace(name="masked"), masked))
    report.print_report(networks, trained, steps, batch, experiment.test)
    before, small = experiment.networks["sparse"], None
    for row in end.history["cuts"]:
        small = shrinking.shrink(before, sparsity.Plan.from_json(row["plan"]))
        report.print_cut(small, before, networks["sparse"], batch, experiment.test)
    if isinstance(networks["sparse"].updater, sparsity.EpochStrategy):
        report.print_prunings(networks["sparse"].updater, end.history["evaluations"])
    (folder / "history.json").write_text(json.dumps(end.history, indent=1), encoding="utf-8")
    pictures = plots.draw_all(networks, trained, end.history, small is not None, folder)
    print(f"{folder} holds {len(pictures)} pictures, history.json and the last checkpoints")


def use_compilation_cache() -> None:
    """Keeps compiled programs beside the project, unless the environment names another place."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(config_lib.ROOT / ".cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def main() -> None:
    use_compilation_cache()
    try:
        options = config_lib.from_command_line()
        run = prepare(options)
    except (ValueError, ImportError, OSError, flags.Error) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    try:
        end = fit(*run)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes from the last checkpoint")
    run.checkpoints.close()
    finish(run.experiment, end, options.run_dir)


if __name__ == "__main__":
    main()
