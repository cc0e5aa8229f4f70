"""`sparsity.calibrate`: statistics of the inputs of each weight, while the model runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.reuse import compile_at_call
from sparsity.calibration.statistics.alignment import (
    Alignment,
    align,
    describe_function,
)
from sparsity.calibration.statistics.row_axes import (
    RowAxes,
    RowWeights,
    check_any_counts,
    find_row_axes,
    read_row_weights,
)
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.sums import (
    FIELDS_BY_KIND,
    StatisticsKind,
    Steps,
    SummingInterpreter,
    Sums,
    Uses,
    add,
    add_batch,
    sum_inputs,
    sum_outputs,
)
from sparsity.calibration.statistics.validation import make_not_finite_error
from sparsity.core import extras, sharding, trees
from sparsity.core.checks import check_bool, check_function, check_iterable, check_values
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph import Graph, Parameter, trace
from sparsity.graph.affine import FunctionKey
from sparsity.programs.products import read_product


def calibrate(
    fn: Callable[[PyTree, PyTree], PyTree],
    params: Params,
    batches: Iterable[PyTree],
    kind: StatisticsKind = "squares",
    filter_fn: Callable[[Path, Parameter], bool] | None = None,
    progress: bool = False,
    row_weights: RowWeights | None = None,
) -> dict[Path, Statistic]:
    """Runs a model on batches and sums up the inputs of each product that reads a weight.

    The program that `sparsity.trace` reads runs together with the sums: no hook, no subclass,
    any framework. A weight with several uses sums over all of them.

    Args:
      fn: the model, `fn(params, batch)`.
      params: its parameters.
      batches: second arguments of `fn`, any trees; a generator is read once.
      kind: 'squares' sums |x|^2 for each input, 'moments' sums |x|^2 and x, 'gram' sums X^T X (of
        complex inputs X^H X) and x.
      filter_fn: `filter_fn(path, parameter)` chooses parameters, by their shape and dtype; by
        default all that products contract.
      progress: show a bar of the batches. Needs tqdm.
      row_weights: weights of the rows of a batch, as a function of the batch or an array of leading
        axes of the batch: a row of weight w counts w times, and not at all at 0.

    Returns:
      A dictionary from paths to `Statistic`, which holds sums in promote_types(dtype, float32) over
      all rows of all batches, with leading axes for scanned layers and experts. Sums run over all
      steps of a loop. The inputs of a product with 0.25 * w count as 0.25 times these inputs; that
      with c * w + d, for arrays of other parameters and constants, has c and d as the `multiplier`
      and `offset` of its statistic. Weights that a product reads in a `while`, by slices, by
      `ragged_dot`, stacked with others, within `shard_map`, without data, or behind another
      function have no entry; a pruner that needs one names the weight.

    Raises:
      ValueError: there are no batches, the sums of one are not finite, or rows have no weights of
        their own; the error names parameter and batch.

    Example:
      >>> params = {"kernel": jnp.ones((2, 3))}
      >>> batches = [jnp.array([[1.0, 2.0]])] * 2
      >>> statistic = calibrate(lambda p, x: x @ p["kernel"], params, batches)[("kernel",)]
      >>> statistic.squares, int(statistic.count)
      (Array([2., 8.], dtype=float32), 2)
    """
    if kind not in (kinds := (*FIELDS_BY_KIND,)):
        raise ValueError(f"kind must be one of {kinds}, got kind = {kind!r}.")
    check_iterable("batches", batches)
    check_function("filter_fn", filter_fn, "(path, parameter)", optional=True)
    check_bool("progress", progress)
    if progress:
        batches = extras.load("tqdm.auto", "progress").tqdm(batches)
    calibration, total = _collect_sums(
        fn, params, batches, kind, filter_fn, row_weights=row_weights
    )
    return calibration.pop_statistics(total, params)


class Calibration:
    """Uses of parameters in a graph, and the sums over their rows.

    Args:
      graph: the graph.
      kind: the kind of sums.
      filter_fn: selects parameters; `None` for all whose inputs match entries of the parameter.

    Attributes:
      uses: the uses by index, of parameters whose entries match the inputs of all their products.
      alignments: of these uses, by index.
    """

    def __init__(
        self,
        graph: Graph,
        kind: StatisticsKind,
        filter_fn: Callable[[Path, Parameter], bool] | None,
    ) -> None:
        leaves = {param.path: param for param in graph.parameters}
        self.graph: Graph = graph
        self.kind: StatisticsKind = kind
        alignments = {
            use_index: align(use, graph)
            for use_index, use in enumerate(graph.uses)
            if use.contracting and (filter_fn is None or filter_fn(use.path, leaves[use.path]))
        }
        refused = {graph.uses[use_index].path for use_index, x in alignments.items() if x is None}
        functions: dict[Path, FunctionKey | None] = {}
        for use in (graph.uses[use_index] for use_index in alignments):
            key = describe_function(use, graph)
            if functions.setdefault(use.path, key) != key:
                refused.add(use.path)
        self.alignments: dict[int, Alignment] = {
            use_index: x
            for use_index, x in alignments.items()
            if x is not None and x.use.path not in refused
        }
        self.uses: Uses = Uses({use_index: x.use for use_index, x in self.alignments.items()})

    def sum_inputs(
        self, use_index: int, x: jax.Array, row_weights: jax.Array | None = None
    ) -> Statistic:
        """Returns the sums of a use over the rows of its inputs."""
        sum_rows = functools.partial(sum_inputs, self.alignments[use_index], self.kind)
        return sharding.call_replicated(sum_rows, x, row_weights)

    def sum_outputs(
        self,
        use_index: int,
        x: jax.Array,
        *matrices: jax.Array,
        row_weights: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the sums of |y|^2 over the outputs y that each matrix gives in place of a use."""

        def sum_rows(
            x: jax.Array, row_weights: jax.Array | None, *matrices: jax.Array
        ) -> jax.Array:
            return sum_outputs(self.alignments[use_index], x, *matrices, row_weights=row_weights)

        return sharding.call_replicated(sum_rows, x, row_weights, *matrices)

    def spread(
        self, use_index: int, row_axes: RowAxes | None, weights: jax.Array | None
    ) -> jax.Array | None:
        """Returns row weights that broadcast to the inputs of a use; `None` for all 1.

        Raises:
          ValueError: the rows of the product are no rows of the weights.
        """
        if row_axes is None or weights is None:
            return None
        use = self.uses[use_index]
        value = use.equation.inputs[1 - use.operand]
        spread = row_axes.spread(value, weights)
        roles = read_product(use.equation).operands[1 - use.operand]
        mixed = (*roles.contracted, *roles.batch) if use.kind == "dot" else roles.contracted
        if spread is None or any(spread.shape[axis] > 1 for axis in mixed):
            raise ValueError(
                f"row_weights: the rows of the {use.primitive} at {use.source}, which reads "
                f"{trees.join_names(use.path)!r}, cannot be told apart by the axes "
                f"{tuple(np.shape(weights))} of the weights. Give weights of the axes that all "
                "rows have, or leave the parameter out with filter_fn."
            )
        return spread

    def add_multiplier(
        self,
        statistic: Statistic,
        path: Path,
        read: Callable[..., jax.Array],
        index: Mapping[int, int],
    ) -> Statistic:
        """Returns a statistic with the multiplier and the offset that products read, if any.

        Args:
          statistic: of a parameter, or of a layer.
          path: path of the parameter.
          read: `read(path, *layers)` returns a parameter, or one of its first layers.
          index: the layer by axis that scans take apart; without these axes all layers.
        """
        use_index = next(n for n, use in self.uses.items() if use.path == path)
        use, shape = self.uses[use_index], self.alignments[use_index].shape
        if use.view.scale is not None:
            return statistic
        axes = [axis for axis in use.view.stacked if axis not in index]
        sizes = [self.graph.parameters.find_shape(path)[axis] for axis in axes]
        arrays = []
        for layers in np.ndindex(*sizes):
            by_axis = {**index, **dict(zip(axes, layers, strict=True))}
            scans = zip(use.view.stacked, use.view.scans, strict=True)
            by_scan = {scan: by_axis[axis] for axis, scan in scans}
            arrays.append(self.graph.affine.evaluate(use, read, by_scan, shape))
        multiplier, offset = (
            jnp.moveaxis(jnp.stack(x).reshape(*sizes, *shape), range(len(axes)), axes)
            for x in zip(*arrays, strict=True)
        )
        has_offset = bool(offset.any())
        return dataclasses.replace(
            statistic, multiplier=multiplier, offset=offset if has_offset else None
        )

    def pop_statistics(self, total: Sums, params: Params) -> dict[Path, Statistic]:
        """Returns the statistics of parameters, and pops the sums of their uses."""
        statistics: dict[Path, Statistic] = {}
        for use_index in sorted(total):
            use = self.uses[use_index]
            statistic = self.alignments[use_index].add_layers(total.pop(use_index))
            sums_before = statistics.get(use.path)
            if sums_before is not None and not have_equal_axes(sums_before, statistic):
                raise ValueError(
                    f"{trees.join_names(use.path)!r} is read along other axes by the "
                    f"{use.primitive} at {use.source} than by a product before it, so that their "
                    "inputs cannot be added up. Give each a parameter of its own, or leave it out: "
                    "filter_fn."
                )
            statistics[use.path] = statistic if sums_before is None else add(sums_before, statistic)
        arrays = trees.leaves_by_names(params)

        def read(path: Path, *layers: int) -> jax.Array:
            return jnp.asarray(arrays[path])[layers]

        return {
            path: self.add_multiplier(
                merge_counts(statistic, self.graph.parameters.find_shape(path)), path, read, {}
            )
            for path, statistic in statistics.items()
        }


def _collect_sums(
    fn: Callable[[PyTree, PyTree], PyTree],
    params: Params,
    batches: Iterable[PyTree],
    kind: StatisticsKind,
    filter_fn: Callable[[Path, Parameter], bool] | None,
    matrices: Mapping[Path, Sequence[jax.Array]] | None = None,
    row_weights: RowWeights | None = None,
) -> tuple[Calibration, Sums]:
    """Runs a model on batches and adds up their sums: of inputs, or of the outputs of matrices.

    Args:
      fn: the model.
      params: its parameters.
      batches: batches, which may differ in shape.
      kind: the kind of sums of inputs.
      filter_fn: selects parameters.
      matrices: [*batch, outputs, inputs] by path of the parameter. Sums of their outputs also run
        over the layers of a stacked weight; those of inputs are kept apart.
      row_weights: weights of the rows of a batch.

    Returns:
      (the calibration of the last batch, the sums of all batches).
    """
    graph: Graph | None = None
    first_batch: PyTree = None
    total: Sums = {}
    all_weights: list[PyTree] = []

    @functools.cache
    def compile_sums(
        graph: Graph, shape: tuple[int, ...]
    ) -> tuple[Calibration, Callable[..., PyTree]]:
        calibration = Calibration(graph, kind, filter_fn)
        row_axes = find_row_axes(graph, shape) if shape else None
        run = functools.partial(_run, calibration, row_axes)
        return calibration, compile_at_call(jax.jit(run))

    for index, batch in enumerate(batches):
        if graph is None:
            graph, first_batch = trace(fn, params, batch), batch
        check_structure(batch, first_batch, index)
        weights = read_row_weights(row_weights, batch, index)
        all_weights.append(weights)
        calibration, run = compile_sums(graph.retrace(params, batch), np.shape(weights))
        check_values("params", params, "Calibrate outside of jit.")
        check_values(f"batches[{index}]", batch, "Calibrate outside of jit.")
        arrays = trees.split_arrays(params)[0], trees.split_arrays(batch)[0]
        sums, finite = run(*arrays, matrices, weights)
        for use_index, finite_sums in jax.device_get(finite).items():
            if not finite_sums:
                name = trees.join_names(calibration.uses[use_index].path)
                raise make_not_finite_error(name, index)
        total = {n: add_batch(total.get(n), x) for n, x in sums.items()}
    if graph is None:
        raise ValueError("batches has no batch: give at least one.")
    check_any_counts(all_weights)
    return calibration, total


def _run(
    calibration: Calibration,
    row_axes: RowAxes | None,
    leaves: PyTree,
    inputs: PyTree,
    matrices: PyTree,
    weights: PyTree,
) -> tuple[Sums, PyTree]:
    """Runs a model on a batch: the sums by index of the use, and whether they are finite."""
    spread = functools.partial(calibration.spread, row_axes=row_axes, weights=weights)
    sum_up = functools.partial(_sum_up, calibration, matrices, spread)
    interpreter = SummingInterpreter(calibration.uses, sum_up, stacks=matrices is None)
    interpreter.run(calibration.graph.model.program, [*leaves, *inputs])
    sums = interpreter.sums
    return sums, {n: _are_finite(x) for n, x in sums.items()}


def _sum_up(
    calibration: Calibration,
    matrices: PyTree,
    spread: Callable[[int], jax.Array | None],
    use_index: int,
    x: jax.Array,
    steps: Steps,
) -> PyTree:
    """Returns the sums of a use: over its inputs, or over the outputs of matrices of its layer."""
    if matrices is None:
        return calibration.sum_inputs(use_index, x, spread(use_index))
    use = calibration.uses[use_index]
    layer = tuple(steps[scan] for scan in use.view.scans)
    layers = [matrix[layer] for matrix in matrices[use.path]]
    return calibration.sum_outputs(use_index, x, *layers, row_weights=spread(use_index))


def sum_losses(
    fn: Callable[[PyTree, PyTree], PyTree],
    params: Params,
    batches: Iterable[PyTree],
    matrices: Mapping[Path, Sequence[jax.Array]],
    row_weights: RowWeights | None = None,
) -> dict[Path, jax.Array]:
    """Returns the sums of |y|^2 over the outputs y that each matrix gives in place of a parameter.

    Args:
      fn: the model.
      params: its parameters.
      batches: the batches.
      matrices: [*batch, outputs, inputs] by path of the parameter.
    """
    calibration, sums = _collect_sums(
        fn, params, batches, "squares", lambda path, _: path in matrices, matrices, row_weights
    )
    losses = dict.fromkeys(matrices, jnp.zeros(()))
    for use_index, loss in sums.items():
        losses[calibration.uses[use_index].path] += loss
    return losses


def check_structure(batch: PyTree, first: PyTree, index: int) -> None:
    """Raises a ValueError for a batch that differs from the first one in more than arrays."""
    if _describe_structure(batch) != _describe_structure(first):
        raise ValueError(
            f"Batch {index} differs from batch 0 in more than arrays: "
            f"{_describe_structure(batch)}, {_describe_structure(first)}. All must be of one "
            "structure; numbers that differ must be arrays."
        )


def _describe_structure(tree: PyTree) -> tuple[jax.tree_util.PyTreeDef, list[object]]:
    """Returns the structure of a tree, and its leaves, with a word in place of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, ["array" if trees.is_array(x) else x for x in leaves]


def have_equal_axes(one: Statistic, other: Statistic) -> bool:
    """Returns whether the sums of two products of a parameter may be added up."""
    axes = "contracting", "output", "batch", "groups"
    return all(getattr(one, name) == getattr(other, name) for name in axes)


def merge_counts(statistic: Statistic, shape: tuple[int, ...] | None = None) -> Statistic:
    """Returns the statistic with one count, or with one for each slice where they differ."""
    rows = np.asarray(statistic.count)
    if (rows == rows.flat[0]).all():
        number = rows.flat[0].item()
        # jax takes integers of 32 bits.
        is_short = number < 2**31 and float(number).is_integer()
        return dataclasses.replace(statistic, count=int(number) if is_short else float(number))
    lead = rows.shape if shape is None else statistic.read_batch_shape(shape)
    wide = rows.reshape(*rows.shape, *[1] * (len(lead) - rows.ndim))
    return dataclasses.replace(statistic, count=np.broadcast_to(wide, lead))


def _are_finite(sums: PyTree) -> jax.Array:
    """Returns whether all arrays of some sums are finite."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(sums)]).all()
