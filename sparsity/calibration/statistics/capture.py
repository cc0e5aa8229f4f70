"""`sparsity.calibrate`: statistics of the inputs of each weight, while the model runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.statistics.alignment import Alignment, align
from sparsity.calibration.statistics.checks import not_finite
from sparsity.calibration.statistics.counts import Count
from sparsity.calibration.statistics.memory import check_memory
from sparsity.calibration.statistics.rows import KINDS, Kind, RowSums, sum_outputs, sum_up
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.summing import Steps, SummingInterpreter, Sums, add
from sparsity.core import extras, sharding, trees
from sparsity.core.checks import check_bool, check_function, check_iterable, check_values
from sparsity.core.dtypes import promote
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Graph, Parameter, Use, trace
from sparsity.graph.graph import retrace
from sparsity.programs.share import share_at_call

C = TypeVar("C", bound="Collector")


def calibrate(
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    kind: Kind = "squares",
    filter_fn: Callable[[Path, Parameter], bool] | None = None,
    progress: bool = False,
) -> dict[Path, Statistic]:
    """Runs a model on batches and sums up the inputs of each product that reads a weight.

    The program that `sparsity.trace` reads runs with the sums beside it: no hook, no subclass,
    any framework. A weight with several uses sums over all of them.

    Args:
      fn: the model, `fn(params, batch)`.
      params: its parameters.
      batches: second arguments of `fn`, any trees; a generator is read once.
      kind: 'squares' sums |x|^2 for each input, 'moments' sums |x|^2 and x, 'gram' sums X^T X (of
        complex inputs X^H X) and x.
      filter_fn: `filter_fn(path, parameter)` chooses parameters, by their shape and dtype; by
        default all that products contract.
      progress: show a progress bar.

    Returns:
      {path: Statistic}: sums in promote_types(dtype, float32) over all rows of all batches, with
      leading axes for scanned layers and experts; sums run over all steps of a loop. Weights that
      are read in a `while`, by slices, by `ragged_dot`, stacked with others, or within `shard_map`
      have no entry; a pruner that needs one names the weight.

    Raises:
      ValueError: there are no batches, the sums of one are not finite, or a Gram matrix does not
        fit into memory; the error names parameter and batch.

    Example:
      >>> params = {"kernel": jnp.ones((2, 3))}
      >>> batches = [jnp.array([[1.0, 2.0]])] * 2
      >>> statistic = calibrate(lambda p, x: x @ p["kernel"], params, batches)[("kernel",)]
      >>> statistic.squares, int(statistic.count)
      (Array([2., 8.], dtype=float32), 2)
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got kind = {kind!r}.")
    check_iterable("batches", batches)
    check_function("filter_fn", filter_fn, "(path, parameter)", optional=True)
    check_bool("progress", progress)
    shown = extras.load("tqdm.auto", "progress").tqdm(batches) if progress else batches

    def make(graph: Graph) -> Calibration:
        calibration = Calibration(graph, kind, filter_fn)
        if kind == "gram":
            # The sums so far, the sums of a batch, and the latter in the order of the operand.
            check_memory(calibration.grams(), copies=3)
        return calibration

    calibration, total = collect(fn, params, shown, make)
    return calibration.statistics(total)


def collect(
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    make: Callable[[Graph], C],
    arguments: PyTree = None,
) -> tuple[C, Sums]:
    """Runs a model on batches and adds up their sums.

    Args:
      fn: the model.
      params: its parameters.
      batches: batches, which may differ in shape.
      make: makes the collector of a graph; called once for each shape of a batch.
      arguments: arrays that the sums depend on.

    Returns:
      (the collector of the last batch, the sums of all batches).
    """
    graph: Graph | None = None
    first: PyTree = None
    total: Sums = {}

    @functools.cache
    def compile_sums(graph: Graph) -> tuple[C, Callable[..., PyTree]]:
        collector = make(graph)
        return collector, share_at_call(jax.jit(collector.run))

    for number, batch in enumerate(batches):
        if graph is None:
            graph, first = trace(fn, params, batch), batch
        check_structure(batch, first, number)
        collector, run = compile_sums(retrace(graph, params, batch))
        check_values("params", params, "Calibrate outside of jit.")
        check_values(f"batches[{number}]", batch, "Calibrate outside of jit.")
        arrays = trees.split_arrays(params)[0], trees.split_arrays(batch)[0], arguments
        sums, finite = run(*arrays)
        for use, finite_sums in jax.device_get(finite).items():
            if not finite_sums:
                raise not_finite(trees.join_names(collector.uses[use].path), number)
        total = _add(total, sums) if total else sums
    if graph is None:
        raise ValueError("batches has no batch: give at least one.")
    return collector, total


_add = jax.jit(add, donate_argnums=0)


def check_structure(batch: PyTree, first: PyTree, number: int) -> None:
    """Raises a ValueError for a batch that differs from the first one in more than arrays."""
    if _without_arrays(batch) != _without_arrays(first):
        raise ValueError(
            f"Batch {number} differs from batch 0 in more than arrays: {_without_arrays(batch)}, "
            f"{_without_arrays(first)}. All must be of one structure; numbers that differ must be "
            "arrays."
        )


def _without_arrays(tree: PyTree) -> tuple[jax.tree_util.PyTreeDef, list[object]]:
    """Returns the structure of a tree, and its leaves, with a word in place of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, ["array" if trees.is_array(x) else x for x in leaves]


class Collector:
    """Runs a graph's program with sums beside it; a subclass defines the sums.

    Args:
      graph: the graph.
      filter_fn: selects parameters; by default all whose inputs match entries of the parameter.
    """

    stacks: ClassVar[bool] = True  # whether the layers of a stacked weight have sums of their own

    def __init__(
        self, graph: Graph, filter_fn: Callable[[Path, Parameter], bool] | None = None
    ) -> None:
        leaves = {param.path: param for param in graph.leaves}
        self.graph = graph
        self.uses: dict[int, Use] = {}
        self.alignments: dict[int, Alignment] = {}  # of one layer, where scans run over several
        for number, use in enumerate(graph.uses):
            if filter_fn is None or filter_fn(use.path, leaves[use.path]):
                alignment = align(use, graph, one_layer=True)
                if alignment is not None and align(use, graph) is not None:
                    self.uses[number], self.alignments[number] = use, alignment

    def sum_up(self, number: int, x: jax.Array, steps: Steps, arguments: PyTree) -> PyTree:
        """Returns the sums of a use over the rows of its inputs."""
        raise NotImplementedError

    def sum_outputs(
        self, number: int, x: jax.Array, steps: Steps, matrices: Sequence[jax.Array]
    ) -> jax.Array:
        """Returns the sums of |y|^2 over the outputs y that each matrix gives in place of a use."""
        sum_up = functools.partial(sum_outputs, self.uses[number], self.alignments[number])
        return sharding.replicated(sum_up, x, *matrices)

    def run(
        self, leaves: Sequence[jax.Array], inputs: Sequence[jax.Array], arguments: PyTree
    ) -> tuple[Sums, dict[int, jax.Array]]:
        """Returns the sums of a call, and whether each is finite."""
        interpreter = SummingInterpreter(
            self.uses, functools.partial(self.sum_up, arguments=arguments), self.stacks
        )
        interpreter.run(self.graph.model.program, [*leaves, *inputs])
        sums = interpreter.sums
        return sums, {number: _are_finite(each) for number, each in sums.items()}


class Calibration(Collector):
    """Sums up the inputs of uses.

    Args:
      graph: the graph.
      kind: the kind of sums.
      filter_fn: selects parameters; by default all whose inputs match entries of the parameter.
    """

    def __init__(
        self, graph: Graph, kind: Kind, filter_fn: Callable[[Path, Parameter], bool] | None = None
    ) -> None:
        super().__init__(graph, filter_fn)
        self.kind = kind

    def grams(self, one_layer: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the Gram matrices by name, or of one layer of each stack."""
        grams = {}
        for number, use in self.uses.items():
            alignment = self.alignments[number]
            shape = self.graph.parameters.find_shape(use.path)
            stacked = [] if one_layer else [shape[axis] for axis in use.view.stacked]
            inputs = alignment.axes.inputs(alignment.shape)
            dtype = promote(use.equation.inputs[1 - use.operand].dtype, jnp.float32)
            lead = (*stacked, *alignment.axes.lead(alignment.shape))
            grams[trees.join_names(use.path)] = jax.ShapeDtypeStruct((*lead, inputs, inputs), dtype)
        return grams

    def sum_up(
        self, number: int, x: jax.Array, steps: Steps | None = None, arguments: PyTree = None
    ) -> RowSums:
        sum_rows = functools.partial(sum_up, self.uses[number], self.alignments[number], self.kind)
        return sharding.replicated(sum_rows, x)

    def statistics(self, total: Sums) -> dict[Path, Statistic]:
        """Returns the statistics of parameters, and pops the sums of their uses."""
        statistics: dict[Path, Statistic] = {}
        for number in sorted(total):
            use, statistic = self.uses[number], self.statistic(number, total.pop(number))
            before = statistics.get(use.path)
            if before is not None and not have_equal_axes(before, statistic):
                raise ValueError(
                    f"{trees.join_names(use.path)!r} is read along other axes by the "
                    f"{use.primitive} at {use.source} than by a product before it, so that their "
                    "inputs cannot be added up. Give each a parameter of its own, or leave it out: "
                    "filter_fn."
                )
            statistics[use.path] = statistic if before is None else add(before, statistic)
        return {
            path: _counted(statistic, self.graph.parameters.find_shape(path))
            for path, statistic in statistics.items()
        }

    def statistic(self, number: int, summed: RowSums, one_layer: bool = False) -> Statistic:
        """Returns the statistic of a use from its sums, or of one layer of its parameter."""
        alignment = self.alignments[number] if one_layer else align(self.uses[number], self.graph)
        assert alignment is not None  # or there would be none of a layer
        sums: Mapping[str, Any] = summed[0]
        return dataclasses.replace(alignment.axes, count=summed[1], **sums)


def have_equal_axes(one: Statistic, other: Statistic) -> bool:
    """Returns whether the sums of two products of a parameter may be added up."""
    axes = "contracting", "output", "batch", "groups"
    return all(getattr(one, name) == getattr(other, name) for name in axes)


def _counted(statistic: Statistic, shape: tuple[int, ...]) -> Statistic:
    """Returns the statistic with one count, or with one for each slice where they differ."""
    rows = np.asarray(statistic.count)
    if (rows == rows.flat[0]).all():
        return dataclasses.replace(statistic, count=Count.from_number(int(rows.flat[0])))
    lead = statistic.lead(shape)
    wide = rows.reshape(*rows.shape, *[1] * (len(lead) - rows.ndim))
    return dataclasses.replace(statistic, count=Count.from_number(np.broadcast_to(wide, lead)))


def _are_finite(sums: PyTree) -> jax.Array:
    """Returns whether all arrays of some sums are finite."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(sums)]).all()
