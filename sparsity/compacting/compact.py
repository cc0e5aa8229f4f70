"""`sparsity.compact`: a model in the memory of the values that its masks keep."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.base_updater import BaseUpdater
from sparsity.compacting.carry import Carrier, carry_state, check_fresh_state
from sparsity.compacting.evaluate import Densifier
from sparsity.compacting.kept import Grouped, Kept, Lazy, Observer, kept_in, to_bits
from sparsity.compacting.move import differentiate_directly, make_movers, move_all, move_by_gradient
from sparsity.compacting.report import Row, plot, table
from sparsity.compacting.state import Owner, check_optimizer, densify_state, take_state
from sparsity.compacting.storage import (
    FORMATS,
    VALUES,
    Format,
    Storage,
    list_formats,
    make_storages,
    read_formats,
    read_masks,
)
from sparsity.compacting.tune import Candidate, choose, measure
from sparsity.core import sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Graph
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation
from sparsity.training import comparison
from sparsity.training.kept_state import spread_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Outside: TypeAlias = Literal["zero", "frozen"]
Loss: TypeAlias = Callable[[Callable[..., PyTree], PyTree], jax.Array]
_NO_OBSERVERS: Mapping[Path, Observer] = {}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compact:
    """A model whose masked parameters are their kept values. Made by `compact`.

    A pytree whose leaves are the positions of the values, and frozen entries: give the object to
    compiled functions as an argument, and store it with the values. `params` and `opt_state` are no
    leaves: a compiled function gets them as arguments of their own.

    Formats of a masked parameter. Slices are layers of scans, and experts if all keep equally many
    entries.

    - 'values': [*stack, k] values in the order of the parameter, padded where layers keep different
      numbers. A product makes the slice dense, and again in the backward pass: bit-equal to the
      masked model.
    - 'grouped': [*stack, groups, k, group] values of groups of neighbouring outputs that keep the
      same inputs. Products gather inputs, and nothing is made dense: equal up to rounding.
    - 'slices': [*stack, ...] whole slices along one axis, such as channels and heads, among frozen
      entries. The parameter is made dense, but the gradient is a product of the slices alone.
    - 'dense': the parameter itself. Its gradient is 0 outside the mask.

    Attributes:
      indices: tree like the parameters: positions of the kept values, `None` for dense parameters.
      base: tree like the parameters: entries outside the masks, `None` for zeros. Floats of less
        than 32 bits are stored as unsigned integers of the same bits; others are those of `params`.
      graph: the graph of the model.
      storages: (path, storage) of each masked parameter.
      in_turn: whether dense parameters wait for the inputs of their products, which bounds memory;
        among several devices a product would cost a message.
      params: the parameters to start from: kept values of masked parameters, and dense ones.
      opt_state: the optimizer's state to start from, `None` without `opt_state`.
      update_error: the largest difference between updates of kept values and of masked parameters,
        as a part of the largest entry of an array; `None` without `tx`.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0], [0.0, 2.0]])}
      >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, jnp.ones((1, 2)))
      >>> model = sparsity.compact(graph, params, {"w": jnp.eye(2, dtype=jnp.uint8)})
      >>> model.indices, model.params
      ({'w': Array([0, 3], dtype=int32)}, {'w': Array([1., 2.], dtype=float32)})
    """

    indices: PyTree
    base: PyTree
    graph: Graph
    storages: tuple[tuple[Path, Storage], ...]
    in_turn: bool
    params: PyTree = None
    opt_state: PyTree | None = None
    update_error: float | None = None

    def __repr__(self) -> str:
        return f"Compact({', '.join(f'{x}: {f!r}' for x, f in self.formats.items()) or 'dense'})"

    def apply(self, params: PyTree, *args: PyTree) -> PyTree:
        """Runs the model: returns `fn(params, *args)` of the masked model.

        Can be compiled, differentiated in reverse, mapped and exported like `fn`, at any batch
        size. A masked parameter is dense only while an equation reads the parameter.

        Args:
          params: parameters like `self.params`, in any dtype.
          *args: inputs of the model.

        Raises:
          ValueError: parameters are missing or have another shape; the error names the parameter.
        """
        return self._run(_NO_OBSERVERS, params, *args)

    def move(
        self,
        pruner: BaseUpdater,
        params: PyTree,
        opt_state: PyTree,
        count: chex.Numeric,
        loss: Loss | None = None,
        tx: optax.GradientTransformation | None = None,
    ) -> tuple[Compact, PyTree, PyTree]:
        """Moves the masks once, as SET, RigL or SRigL do in a step that updates masks.

        No shape changes. Entries that stay keep values and moments; grown ones start at 0 with the
        state of a new optimizer; counts stay. Masks are those of the wrapped updater for the same
        parameters, gradients and count. If `loss` reads each slice once, one dense gradient exists
        at a time.

        A call within a compiled function becomes a part of the program. Another call is compiled
        once for the same `loss`: give batches as `jax.tree_util.Partial(loss, batch=batch)`.

        Args:
          pruner: SET, RigL, or another updater that keeps the number of entries of each slice.
            Its schedule is not asked whether a step updates masks.
          params: parameters like `self.params`.
          opt_state: state of the optimizer of `params`.
          count: number of steps so far, for drop fractions and random numbers.
          loss: `loss(apply, params)` returns a scalar, and gives `apply`, which is `Compact.apply`,
            the parameters or a cast of them. RigL ranks its gradients; SET needs none.
          tx: the optimizer, for states in which new entries are not 0, as in adagrad.

        Returns:
          The compact model with the new masks, its parameters, and the optimizer's state.

        Raises:
          ValueError: an update may change the number of kept entries of a slice, `outside` is
            'frozen', or the state needs `tx`. The error names the field or the parameter.

        Example:
          >>> import jax.numpy as jnp, optax, sparsity
          >>> params, x = {"w": jnp.array([[1.0], [2.0], [0.0], [0.0]])}, jnp.arange(4.0)[None]
          >>> masks = {"w": jnp.array([[1], [1], [0], [0]], jnp.uint8)}
          >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, x)
          >>> model = sparsity.compact(graph, params, masks)
          >>> pruner = sparsity.RigL(drop_fraction_fn=optax.constant_schedule(0.5))
          >>> state = optax.adam(0.1).init(model.params)
          >>> loss = lambda apply, params: apply(params, x).sum()
          >>> model, params, state = model.move(pruner, model.params, state, 0, loss)
          >>> model.indices, params
          ({'w': Array([1, 3], dtype=int32)}, {'w': Array([2., 0.], dtype=float32)})
        """
        if self._outside == "frozen":
            raise ValueError(
                "A compact model with outside = 'frozen' has values outside its masks, which "
                "cannot move. Give compact outside='zero'."
            )
        self._wrap(params)
        if pruner.keeps_count and pruner.regrows is False:
            return self, params, opt_state
        if tx is None:
            check_fresh_state(opt_state)
        return _call_move((self, params, opt_state, count), pruner, loss, tx)

    def dense(self, params: PyTree) -> PyTree:
        """Returns the dense parameters; outside the masks they are 0, or frozen."""
        return jax.tree.map(
            lambda leaf: leaf.densify() if isinstance(leaf, Kept) else leaf,
            self._wrap(params),
            is_leaf=lambda leaf: isinstance(leaf, Kept),
        )

    def dense_state(self, opt_state: PyTree) -> PyTree:
        """Returns the optimizer's state of the dense parameters, with moments 0 outside the masks.

        Args:
          opt_state: state of an optimizer of parameters like `self.params`.
        """
        storages = self._storages

        def describe(path: trees.KeyPath, indices: jax.Array) -> Owner:
            return Owner(trees.path_string(path), storages[trees.path_names(path)], indices)

        return densify_state(trees.map_matched(describe, self.indices), opt_state)

    @property
    def masks(self) -> PyTree:
        """Masks like the parameters, uint8, 1 = keep, `None` for dense parameters."""

        def mask(path: trees.KeyPath, indices: jax.Array) -> jax.Array:
            storage = self._storages[trees.path_names(path)]
            return storage.wrap(jnp.ones(storage.kept_shape, jnp.uint8), indices).densify()

        return trees.map_matched(mask, self.indices)

    @property
    def formats(self) -> dict[Path, Format]:
        """{path: format} of the masked parameters."""
        return {path: storage.format for path, storage in self.storages}

    def measure(
        self, params: PyTree, *args: PyTree, rounds: int = 10
    ) -> dict[Path, dict[Format, float]]:
        """Measures the products of each masked parameter in each format, on this device.

        Formats of one parameter are measured in turn, forward and backward, at the sizes of the
        inputs. Formats that are nearly as fast as the fastest one take up to five times as many
        rounds. Products of equal shapes are measured once in a process for each `rounds`.

        Args:
          params: parameters like `self.params`.
          *args: inputs of the model.
          rounds: number of measurements of each product, at least.

        Returns:
          {path: {format: median seconds}} with the formats that a parameter can have: an argument
          of `report`.
        """
        return self._measure(self._in_all_formats(self.dense(params)), args, rounds)

    def tune(self, params: PyTree, *args: PyTree, rounds: int = 10) -> Compact:
        """Returns the model with the fastest format of each parameter, see `measure`.

        Of formats that are equally fast, the one with fewer bytes wins.

        Args:
          params: parameters like `self.params`.
          *args: inputs of the model.
          rounds: number of measurements of each product, at least.

        Returns:
          A compact model with `params` and `opt_state` in the new formats.
        """
        dense = self.dense(params)
        models = self._in_all_formats(dense)
        nbytes = {
            (path, name): sum(stored)
            for name, model in models.items()
            for path, stored in model._count_bytes().items()
        }
        chosen = choose(self._measure(models, args, rounds), nbytes)
        state = None if self.opt_state is None else self.dense_state(self.opt_state)
        return compact(self.graph, dense, self.masks, state, None, self._outside, chosen)

    def report(self, seconds: Mapping[Path, Mapping[Format, float]] | None = None) -> str:
        """Returns a table of the parameters: format, kept values, and bytes.

        Lines below name operations that make a parameter dense outside of products.

        Args:
          seconds: times from `measure`, shown as columns.

        Returns:
          Text of several lines.
        """
        return table(self._rows(), seconds or {})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the bytes of all parameters: dense in light, compact in dark.

        Args:
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        return plot(self._rows(), ax)

    @property
    def _outside(self) -> Outside:
        return "frozen" if jax.tree.leaves(self.base) else "zero"

    def _in_all_formats(self, dense: PyTree) -> dict[Format, Compact]:
        """Returns the model in each format, where parameters can have the format."""
        if quantized := [path for path, each in self.storages if each.is_quantized]:
            raise ValueError(
                f"{trees.join_names(quantized[0])!r} is quantized, and formats are measured for "
                "floating parameters only. Give formats."
            )
        masks, models = self.masks, dict[Format, Compact]()
        arrays = read_masks(self.graph, masks)
        possible = list_formats(self.graph, arrays, self._outside == "frozen")
        for name in FORMATS:
            formats = {x: name if name in possible[x] else VALUES for x in arrays}
            models[name] = compact(self.graph, dense, masks, None, None, self._outside, formats)
        return models

    def _measure(
        self, models: Mapping[Format, Compact], args: tuple[PyTree, ...], rounds: int
    ) -> dict[Path, dict[Format, float]]:
        """Returns `measure` of the model in several formats."""
        candidates = {}
        for name, model in models.items():
            reads = model._list_reads(self.graph.model.example[0], args)
            paths = {
                trees.join_names(path): path for path, each in model.formats.items() if each == name
            }
            values, indices = (
                {trees.path_string(path): leaf for path, leaf in trees.leaves_by_path(tree).items()}
                for tree in (model.params, model.indices)
            )
            equations = [read[:2] for read in reads]
            candidates[name] = Candidate(paths, equations, values, indices, model.in_turn)
        return measure(candidates, rounds)

    @functools.cached_property
    def _storages(self) -> dict[Path, Storage]:
        return dict(self.storages)

    def _count_bytes(self) -> dict[Path, tuple[int, int]]:
        """Returns the bytes of the values that stand for each parameter, and of their positions."""
        indices, nbytes = _by_path(self.indices), {}
        for leaf in self.graph.leaves:
            storage = self._storages.get(leaf.path)
            size = leaf.size if storage is None else math.prod(storage.kept_shape)
            positions = 0 if storage is None else indices[leaf.path].nbytes
            nbytes[leaf.path] = size * leaf.dtype.itemsize, positions
        return nbytes

    def _run(self, observers: Mapping[Path, Observer], params: PyTree, *args: PyTree) -> PyTree:
        """Returns what `apply` returns, with gradients of dense parameters for some observers."""
        graph, inputs = self._retrace(params, args, observers)
        outputs = Densifier(graph.tracker.is_data, self.in_turn).run(graph.model.program, inputs)
        return jax.tree.unflatten(graph.model.output_tree, outputs)

    def _retrace(
        self,
        params: PyTree,
        args: tuple[PyTree, ...],
        observers: Mapping[Path, Observer] = _NO_OBSERVERS,
    ) -> tuple[Graph, list[Lazy]]:
        """Returns the graph of the model for these arguments, and the inputs of its program."""
        arrays, rebuild = trees.split_arrays(params)
        wrapped = self._wrap(params, observers)
        kept = jax.tree.leaves(wrapped, is_leaf=lambda x: isinstance(x, Kept))
        kept = [leaf for leaf in kept if isinstance(leaf, Kept) or trees.is_array(leaf)]
        structs = [
            sharding.resized(struct, leaf.shape)
            for struct, leaf in zip(sharding.abstract(arrays), kept, strict=True)
        ]
        example = rebuild(  # the model casts quantized parameters
            [
                sharding.with_dtype(struct, leaf.base_dtype)
                if isinstance(leaf, Kept) and leaf.is_quantized
                else struct
                for struct, leaf in zip(structs, kept, strict=True)
            ]
        )
        return self.graph.retrace(example, *args), [*kept, *trees.split_arrays(args)[0]]

    def _wrap(self, params: PyTree, observers: Mapping[Path, Observer] = _NO_OBSERVERS) -> PyTree:
        """Returns the parameters with `Kept` for masked ones.

        Raises:
          ValueError: a parameter is missing, or has another shape than its kept values.
        """
        storages = self._storages

        def wrap(
            path: trees.KeyPath, leaf: PyTree, indices: jax.Array | None, base: jax.Array | None
        ) -> PyTree:
            if indices is None:
                return leaf
            names, name = trees.path_names(path), trees.path_string(path)
            storage = storages[names]
            if jnp.shape(leaf) != storage.kept_shape:
                raise ValueError(
                    f"The kept values of {name!r} have the shape {storage.kept_shape}, got "
                    f"{jnp.shape(leaf)}. Give parameters like compact.params."
                )
            kept = storage.wrap(leaf, indices, base, name)
            return dataclasses.replace(kept, observer=observers.get(names))

        return trees.map_matched(
            wrap, params, self.indices, self.base, others_role="positions of kept values"
        )

    def _rows(self) -> list[Row]:
        """Returns the rows of tables and pictures, in tree order."""
        readers, stored = self._find_readers(), self._count_bytes()
        rows = []
        for leaf in self.graph.leaves:
            storage = self._storages.get(leaf.path)
            name, padding, size = "", 0, leaf.size
            if storage is not None:
                name, padding = storage.format, storage.padding
                size = math.prod(storage.kept_shape) - padding
            row = Row(
                name=leaf.name,
                path=leaf.path,
                shape=leaf.shape,
                format=name,
                kept=size,
                padding=padding,
                nbytes=leaf.size * leaf.dtype.itemsize,
                stored=stored[leaf.path],
                readers=tuple(sorted(readers.get(leaf.name, ()))),
            )
            rows.append(row)
        return rows

    def _find_refused(self, chosen: Container[Path]) -> list[Path]:
        """Returns the paths of format 'grouped' that some product reads as a dense array.

        Args:
          chosen: paths whose format was asked for.
        """
        grouped = [path for path, each in self.formats.items() if each == "grouped"]
        candidates = [path for path in grouped if path not in chosen]
        readers = self._find_readers() if candidates else {}
        return [path for path in candidates if trees.join_names(path) in readers]

    def _find_readers(self) -> dict[str, set[str]]:
        """Returns {name: operations that need a dense array, other than products of values}."""
        readers: dict[str, set[str]] = {}
        for equation, inputs, is_dense in self._list_reads(*self.graph.model.example):
            for kept in kept_in(inputs) if is_dense else ():
                if equation.name not in PRODUCTS or isinstance(kept, Grouped):
                    where = f"{equation.name} {equation.source}".strip()
                    readers.setdefault(kept.name, set()).add(where)
        return readers

    def _list_reads(
        self, params: PyTree, args: tuple[PyTree, ...]
    ) -> list[tuple[Equation, list[Lazy], bool]]:
        """Returns the equations that read masked parameters.

        Args:
          params: the dense parameters, or their shapes.
          args: inputs of the model, or their shapes.

        Returns:
          For each equation its inputs as shapes, and whether the parameter is made dense.
        """
        params, args = sharding.abstract((params, args))
        reads: list[tuple[Equation, list[Lazy], bool]] = []

        def record(equation: Equation, inputs: Sequence[Lazy], is_dense: bool) -> None:
            reads.append((equation, jax.tree.map(sharding.abstract, list(inputs)), is_dense))

        def shrink(path: trees.KeyPath, leaf: PyTree) -> PyTree:
            storage = self._storages.get(trees.path_names(path))
            return leaf if storage is None else _shrink(leaf, storage)

        arrays, rebuild = trees.split_arrays((trees.map_matched(shrink, params), args))

        def run(arrays: list[jax.Array]) -> list[Lazy]:
            graph, inputs = self._retrace(*rebuild(arrays))
            return Densifier(graph.tracker.is_data, False, record).run(graph.model.program, inputs)

        jax.eval_shape(run, arrays)
        return reads


def _call_move(
    arguments: tuple[Compact, PyTree, PyTree, chex.Numeric],
    pruner: BaseUpdater,
    loss: Loss | None,
    tx: optax.GradientTransformation | None,
) -> tuple[Compact, PyTree, PyTree]:
    """Calls `_move`; outside of compiled functions, compiled for the arrays that `loss` holds."""
    leaves, treedef = jax.tree.flatten(loss)
    arrays = [leaf if trees.is_array(leaf) else None for leaf in leaves]
    objects = tuple(None if trees.is_array(leaf) else leaf for leaf in leaves)
    is_inside = any(map(is_traced, jax.tree.leaves((arguments, arrays))))
    run = _move if is_inside else _move_compiled
    model, params, opt_state = run(*arguments, arrays, pruner, objects, treedef, tx)
    return dataclasses.replace(model, params=params, opt_state=opt_state), params, opt_state


def _move(
    model: Compact,
    params: PyTree,
    opt_state: PyTree,
    count: chex.Numeric,
    arrays: list[jax.Array | None],
    pruner: BaseUpdater,
    objects: tuple[object, ...],
    treedef: jax.tree_util.PyTreeDef,
    tx: optax.GradientTransformation | None,
) -> tuple[Compact, PyTree, PyTree]:
    """Returns `Compact.move`; `arrays` and `objects` are the leaves of the loss."""
    leaves = [x if array is None else array for array, x in zip(arrays, objects, strict=True)]
    loss: Loss | None = jax.tree.unflatten(treedef, leaves)
    movers = make_movers(pruner, model.graph.model.example[0], model._storages)
    values, indices = _by_path(params), _by_path(model.indices)
    direct: dict[Path, jax.Array] = {}
    if loss is not None:

        def apply(params: PyTree, *args: PyTree) -> PyTree:
            return model.apply(jax.lax.stop_gradient(params), *args)

        masked = {path: values[path] for path in movers}
        direct = differentiate_directly(
            lambda chosen: loss(apply, _replace_leaves(params, chosen)), masked
        )
    slices = {
        path: mover.slices(values[path], indices[path], count, direct.get(path))
        for path, mover in movers.items()
    }
    if loss is None:
        new = move_all(movers, slices)
    else:
        new = move_by_gradient(
            movers, slices, lambda observers: loss(functools.partial(model._run, observers), params)
        )
    fresh = None if tx is None else tx.init(jax.tree.map(jnp.zeros_like, params))
    carriers = {
        path: Carrier(storage, indices[path], new[path])
        for path, storage in model.storages
        if path in movers
    }
    new, params, opt_state = carry_state(carriers, params, opt_state, fresh)
    moved = dataclasses.replace(model, indices=_replace_leaves(model.indices, new))
    return moved, params, opt_state


_move_compiled = jax.jit(_move, static_argnums=(5, 6, 7, 8))


def _shrink(leaf: jax.ShapeDtypeStruct, storage: Storage) -> jax.ShapeDtypeStruct:
    """Returns the type of the kept values of a parameter."""
    values = sharding.resized(leaf, storage.kept_shape)
    return sharding.with_dtype(values, np.float32) if storage.is_quantized else values


def _by_path(tree: PyTree) -> dict[Path, PyTree]:
    return {trees.path_names(path): leaf for path, leaf in trees.leaves_by_path(tree).items()}


def _replace_leaves(tree: PyTree, leaves: Mapping[Path, jax.Array]) -> PyTree:
    return trees.map_matched(lambda path, leaf: leaves.get(trees.path_names(path), leaf), tree)


# `register_dataclass` of jax 0.8 fails for fields that are no part of the pytree.
jax.tree_util.register_pytree_with_keys(
    Compact,
    lambda model: (
        [(jax.tree_util.GetAttrKey(name), getattr(model, name)) for name in ("indices", "base")],
        (model.graph, model.storages, model.in_turn),
    ),
    lambda static, leaves: Compact(*leaves, *static),  # type: ignore[call-arg]
)


def compact(
    graph: Graph,
    params: PyTree,
    masks: PyTree,
    opt_state: PyTree | None = None,
    tx: optax.GradientTransformation | None = None,
    outside: Outside = "zero",
    formats: Mapping[Path, Format] | Mapping[str, Format] | None = None,
) -> Compact:
    """Stores masked parameters as their kept values, for training in the memory of these values.

    Any optimizer that works entry by entry trains the values: `tx.init(compact.params)`, and
    `compact.apply` in the loss. The optimizer needs no wrapper.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced.
      masks: masks of any pattern, not packed; `None` for dense parameters.
      opt_state: state of an optimizer of `params`, to continue a run: moments of kept entries and
        counts stay. Of a SparseState the inner state is taken, with `use_compact_state` too.
      tx: the (inner) optimizer of that state, to check that kept values train as the masked model:
        four updates by random gradients are compared.
      outside: 'zero': entries outside the masks are 0. 'frozen': these entries stay as they are in
        `params`, and are not trained. Parameters may be small integers or float8 that the model
        casts to a wider float: values are float32, in units of the parameter, before any scale.
      formats: {path: format} of some parameters, each path a tuple of strings or joined by '/'; see
        `Compact`. Others are 'grouped' where 4 or more neighbouring outputs keep the same inputs
        and all products allow it, 'slices' for whole slices if others are frozen, else 'values'.

    Raises:
      ValueError: masks or state do not fit `params`, a masked parameter is not floating, `tx`
        would train kept values otherwise, a format or a path is unknown, a mesh divides an axis
        that indexes no slices, or a quantized parameter is not cast. Errors name the parameter.

    Example:
      >>> import jax, jax.numpy as jnp, sparsity
      >>> params = {"w": jnp.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])}
      >>> masks = {"w": jnp.array([[1, 0, 1], [0, 1, 0]], jnp.uint8)}
      >>> x = jnp.ones((1, 2))
      >>> graph = sparsity.trace(lambda params, x: x @ params["w"], params, x)
      >>> model = sparsity.compact(graph, params, masks)
      >>> model.params["w"], model.apply(model.params, x)
      (Array([1., 2., 3.], dtype=float32), Array([[1., 3., 2.]], dtype=float32))
      >>> jax.grad(lambda params: model.apply(params, x).sum())(model.params)["w"]
      Array([1., 1., 1.], dtype=float32)
    """
    comparison.check_arguments(graph, masks, opt_state, tx)
    if outside not in ("zero", "frozen"):
        raise ValueError(f"outside must be 'zero' or 'frozen', got outside = {outside!r}.")
    graph.parameters.match(params)
    arrays = read_masks(graph, masks, outside == "frozen")
    chosen = read_formats(formats or {}, arrays)
    model, owner_tree = _build(graph, params, arrays, chosen, outside == "frozen")
    if opt_state is not None:
        opt_state = spread_state(opt_state, params)
        model = dataclasses.replace(model, opt_state=take_state(owner_tree, opt_state))
    if tx is not None:
        error = check_optimizer(tx, params, owner_tree, opt_state)
        model = dataclasses.replace(model, update_error=error)
    return model


def _build(
    graph: Graph,
    params: PyTree,
    masks: Mapping[Path, np.ndarray],
    formats: Mapping[Path, Format],
    is_frozen: bool,
) -> tuple[Compact, PyTree]:
    """Returns the compact model without an optimizer's state, and the tree of `Owner`s."""
    storages, indices = make_storages(graph, masks, formats, is_frozen)
    if is_frozen:
        leaves = _by_path(params)
        storages = {
            path: dataclasses.replace(storage, base_dtype=np.dtype(leaves[path].dtype))
            for path, storage in storages.items()
        }

    def describe(path: trees.KeyPath, leaf: PyTree) -> Owner:
        names = trees.path_names(path)
        return Owner(trees.path_string(path), storages.get(names), indices.get(names))

    owner_tree = trees.map_matched(describe, params)
    model = _store(graph, params, owner_tree, storages, is_frozen)
    if any(storage.is_quantized for _, storage in model.storages):
        model._find_readers()  # raises an error for reads that are no casts
    if refused := model._find_refused(formats):
        formats = {**formats, **dict.fromkeys(refused, VALUES)}
        return _build(graph, params, masks, formats, is_frozen)
    return model, owner_tree


def _store(
    graph: Graph,
    params: PyTree,
    owner_tree: PyTree,
    storages: Mapping[Path, Storage],
    is_frozen: bool,
) -> Compact:
    """Returns the compact model without an optimizer's state."""
    owners = trees.leaves_by_path(owner_tree)

    def index(path: trees.KeyPath, leaf: PyTree) -> jax.Array | None:
        owner: Owner = owners[path]
        if owner.storage is None or owner.indices is None:
            return None
        return owner.storage.place(np.asarray(owner.indices), leaf, owner.name)

    def freeze(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        storage = owners[path].storage
        if storage is None or not is_frozen:
            return None
        is_ordered = storage.order == tuple(range(leaf.ndim))
        return to_bits(leaf if is_ordered else leaf.transpose(storage.order))

    def take(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        owner: Owner = owners[path]
        if owner.storage is not None and isinstance(leaf, jax.ShapeDtypeStruct):
            return _shrink(leaf, owner.storage)
        return owner.take(leaf)

    return Compact(
        trees.map_matched(index, params),
        trees.map_matched(freeze, params),
        graph,
        tuple(storages.items()),
        jax.device_count() == 1,
        trees.map_matched(take, params),
    )
