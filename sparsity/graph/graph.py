"""The graph of a model, which `sparsity.trace` returns, and the costs of its program."""

from __future__ import annotations

import fnmatch
import functools
import math
import operator
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

import chex
import jax
import numpy as np

from sparsity.core import extras, sharding, trees
from sparsity.core.checks import check_iterable, check_kind, check_values
from sparsity.core.extras import draw_bars, pick_axes
from sparsity.core.names import suggest
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree, Tree
from sparsity.graph.affine import AffineFunctions
from sparsity.graph.coupling import ANALYSED_PRIMITIVES
from sparsity.graph.depth import (
    LayerStack,
    ResidualBlock,
    ResidualBranch,
    compare_streams,
    find_blocks,
    find_stacks,
)
from sparsity.graph.groups import ChannelGroup, Refusal, check_importance
from sparsity.graph.readers import Bias, PatternAlongInputs, WeightFilter, find_biases
from sparsity.graph.removal import Removal
from sparsity.graph.traced_model import Model, Parameter, Parameters, trace_model
from sparsity.graph.uses import Tracker, Use
from sparsity.masks.budgets import Cost
from sparsity.patterns import FanIn, NByM, SparsityType
from sparsity.programs.axes import Axis, Variable, count_entries
from sparsity.programs.products import NO_PRODUCTS, PRODUCTS, read_product
from sparsity.programs.program import Equation, Program

Number: TypeAlias = PyTree  # int, Fraction or Cost


class Costs:
    """Multiply-adds and bytes of a model: dense, masked, or without some channels.

    Args:
      model: the model.
      tracker: the uses of its parameters.
      removal: the axes of its values.
    """

    def __init__(self, model: Model, tracker: Tracker, removal: Removal) -> None:
        self._model, self._tracker, self._removal = model, tracker, removal

    def count_macs(self, path: Path) -> int:
        """Counts multiply-adds of all products of a parameter; each product counts once."""
        return sum(use.macs for use in self._list_largest_uses(path))

    def count_sparse_macs(self, density: Mapping[Path, Number]) -> Number:
        """Counts multiply-adds if only a part of the entries of some parameters differs from 0."""
        readers: dict[Equation, list[Use]] = {}
        for use in self._tracker.products:
            readers.setdefault(use.equation, []).append(use)

        def count(product: Equation) -> Number:
            uses = readers.get(product, ())
            lhs, rhs = ([use for use in uses if use.operand == i] for i in range(2))
            return (
                read_product(product).macs
                * _compute_operand_density(lhs, density)
                * _compute_operand_density(rhs, density)
            )

        return _sum_products(self._model.program, count)

    def count_small_macs(
        self, sizes: Mapping[Variable, Number], path: Path | None = None
    ) -> Number:
        """Counts multiply-adds at smaller sizes of some axes: of a call, or of one parameter."""

        def count(equation: Equation) -> Number:
            product, axes = read_product(equation), self._removal.coupling.axes
            macs = _multiply_sizes([axes(value)[axis] for value, axis in product.cost], sizes)
            return macs if product.inserted == 1 else macs * Fraction(1, product.inserted)

        if path is None:
            steps = self._removal.coupling.step_axes
            trips = {scan: count_entries(axis, sizes) for scan, axis in steps.items()}
            return _sum_products(self._model.program, count, trips)
        return sum(
            self._count_trips(use, sizes) * use.view.share * count(use.equation)
            for use in self._list_largest_uses(path)
        )

    def _count_trips(self, use: Use, sizes: Mapping[Variable, Number]) -> Number:
        """Counts the trips of a product, at smaller sizes of the layers that its loops index."""
        steps = [self._removal.coupling.step_axes[scan] for scan in use.view.scans]
        full = math.prod(axis.size for axis in steps)
        trips = 1 if use.trips is None else use.trips
        return trips * _multiply_sizes(steps, sizes) * Fraction(1, full or 1)

    def count_small_bytes(self, sizes: Mapping[Variable, Number], paths: Container[Path]) -> Number:
        """Counts bytes of some parameters at smaller sizes of some axes."""
        return sum(
            _multiply_sizes(axes, sizes) * parameter.dtype.itemsize
            for parameter, axes in self._removal.list_parameter_axes()
            if parameter.path in paths
        )

    @functools.cached_property
    def uncounted(self) -> dict[str, str]:
        """Primitives whose multiply-adds do not count, each with the first line that uses them."""
        counted, sources = NO_PRODUCTS.union(*ANALYSED_PRIMITIVES), dict[str, str]()
        for program in self._model.program.nested_programs():
            for equation in program.flat_equations():
                if not equation.inner_programs and equation.name not in counted:
                    sources.setdefault(equation.name, equation.source)
        return sources

    def _list_largest_uses(self, path: Path) -> list[Use]:
        """Returns one use for each product of a parameter: that of the largest part."""
        uses = sorted(self._tracker.find_products(path), key=lambda use: use.view.share)
        return list({use.equation: use for use in uses}.values())


def _sum_products(
    program: Program,
    count: Callable[[Equation], Number],
    trips: Mapping[Equation, Number] = types.MappingProxyType({}),
) -> Number:
    """Sums `count` over the products of a call: the costliest branch, one trip of a `while`.

    `trips` has the numbers of steps of scans that differ from those of the program.
    """
    total: Number = 0
    for equation in program.flat_equations():
        if equation.name in PRODUCTS:
            total = total + count(equation)
        elif equation.inner_programs:
            counts = [
                _sum_products(body.program, count, trips)
                * trips.get(equation, 1 if body.trips is None else body.trips)
                for body in equation.list_bodies()
            ]
            if not equation.is_choice:
                total = total + sum(counts)
            elif any(isinstance(count, Cost) for count in counts):
                total = total + Cost({}, [[Cost.convert(count) for count in counts]])
            else:
                total = total + max(counts)
    return total


def _multiply_sizes(axes: Iterable[Axis], sizes: Mapping[Variable, Number]) -> Number:
    """Returns the product of the sizes of axes, at smaller sizes of some variables."""
    return functools.reduce(operator.mul, [count_entries(axis, sizes) for axis in axes], 1)


def _compute_operand_density(uses: Sequence[Use], density: Mapping[Path, Number]) -> Number:
    """Returns the part of the entries of an operand that may differ from 0.

    Parameters that were joined add up. Parameters that were multiplied bound each other: a
    parameter with a density counts.
    """
    total: Number = Fraction(0)
    uncovered = Fraction(1)  # the part of the operand that no earlier parameter has
    # Parameters with a density come first: dense ones do not bound the entries.
    for use in sorted(uses, key=lambda use: use.path not in density or not use.view.keeps_zeros):
        share = min(use.view.share, uncovered)
        uncovered -= share
        kept_share = density.get(use.path, Fraction(1)) if use.view.keeps_zeros else Fraction(1)
        total = total + kept_share * share
    return total + uncovered if uncovered else total


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_RETRACED = 15  # graphs for other arguments that are kept


def trace(
    fn: Callable[..., PyTree],
    params: Params,
    *args: PyTree,
    state: Mapping[Path | str, Path | str] | None = None,
) -> Graph:
    """Traces `fn(params, *args)` and returns the graph of all uses of its weights.

    Nothing is computed: leaves may be arrays or `jax.ShapeDtypeStruct`s. The model may be written
    with linen, nnx, haiku, equinox or plain functions.

    Args:
      fn: the model: a function of its parameters and inputs. Keyword arguments and flags are given
        by `functools.partial`.
      params: any tree of parameters; leaves that are not arrays are static.
      *args: inputs of the model, any trees.
      state: outputs that the next call reads, as `{path in the output: path in params}`, each a
        tuple of strings or joined by '/', of a leaf or of all leaves below the path. `None` finds
        them: an output becomes a parameter of the same shape and dtype if its path ends in the
        path of the parameter, that path has a name, not only numbers, and the output is computed
        from the parameter without a product.

    Returns:
      The graph: uses, costs, and the channels that can be removed.

    Raises:
      ValueError: the function reads its parameters from elsewhere, or `state` names missing paths.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 2))}
      >>> model = lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]
      >>> graph = trace(model, params, jnp.ones((5, 3)))
      >>> graph.macs()
      200
      >>> [(group.name, group.size) for group in graph.groups]
      [('up:1', 8)]
    """
    return Graph(trace_model(fn, params, args, state), functools.partial(trace, state=state))


class Graph:
    """Graph of a model: uses, costs and coupled channels of its weights. Made by `sparsity.trace`.

    Attributes:
      parameters: every `Parameter`: path, shape and dtype, in tree order.
      uses: every product, convolution and lookup that reads a parameter.
      state: outputs that the next call reads: {path in the output: path in params}.
      trace: `trace(fn, params, *args)` makes the graph of another function, with this `state`.

    The analyses `model`, `tracker`, `removal` and `costs`, and the method `retrace`, serve other
    folders of the package and may change.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 4))}
      >>> def model(params, x):
      ...     return x @ params["up"] @ params["down"]
      >>> graph = sparsity.trace(model, params, jnp.ones((1, 8)))
      >>> graph.macs(), graph.groups[0].size
      (192, 16)
      >>> graph.uses[0].path, graph.uses[0].contracting
      (('up',), (0,))
    """

    def __init__(self, model: Model, trace: Callable[..., Graph]) -> None:
        self.state: Mapping[Path, Path] = model.state
        self.trace = trace
        self.model = model  # the traced program
        self.tracker: Tracker = Tracker(model)  # arrays that hold entries of parameters
        self.uses: Sequence[Use] = self.tracker.uses
        # Coupled axes, and proofs that channels may go.
        self.removal: Removal = Removal(model, self.tracker.products)
        # Costs also of masked and smaller models.
        self.costs: Costs = Costs(model, self.tracker, self.removal)
        self.parameters: Parameters = Parameters(model.parameters, self._list_removable)
        self._retraced: list[tuple[PyTree, Graph]] = []  # (arguments, graph), of `retrace`

    def _list_removable(self) -> set[tuple[Path, int]]:
        """Returns (path, axis) of all axes that can lose channels or layers."""
        stacked = (self.removal.list_stacked(stack.variable) for stack in self.stacks)
        return self.removal.list_members() | {(path, 0) for paths in stacked for path in paths}

    @functools.cached_property
    def affine(self) -> AffineFunctions:
        """The entrywise affine functions of parameters that products read."""
        return AffineFunctions(self.model, self.tracker)

    @functools.cached_property
    def biases(self) -> dict[Path, Bias]:
        """{weight: parameter that shifts the outputs of the weight, and nothing else}."""
        return find_biases(self.model, self.tracker)

    @functools.cached_property
    def matrices(self) -> frozenset[Path]:
        """Paths of weights and tables, which have two axes or more beyond layers of scans.

        Biases are not among them, nor are scales and shifts along one axis, in any shape.
        """
        used = {use.path for use in self.uses}
        biases = {bias.path for bias in self.biases.values()}
        scanned = self.tracker.find_scanned_axes()

        def is_matrix(parameter: Parameter) -> bool:
            path, shape = parameter.path, parameter.shape
            axes = [i for i in range(len(shape)) if i not in scanned.get(path, ())]
            if path in used:
                return len(axes) > 1
            return sum(shape[i] > 1 for i in axes) > 1 and path not in biases

        return frozenset(x.path for x in self.parameters if is_matrix(x))

    def retrace(self, params: Params, *args: PyTree) -> Graph:
        """Returns the graph of the model for other arguments, or this graph if they are alike.

        Arguments are alike if trees, shapes, dtypes and all leaves that are not arrays (flags,
        numbers, functions) are equal.

        Args:
          params: the parameters; dtypes and containers may differ from those of the trace.
          *args: inputs of the model.
        """
        example = sharding.abstract((params, args))
        for earlier, result in [(self.model.example, self), *self._retraced]:
            if trees.are_alike(example, earlier):
                return result
        graph = self.trace(self.model.fn, example[0], *example[1])
        # A number that changes from call to call must not fill the memory.
        self._retraced = [*self._retraced[-_MOST_RETRACED:], (example, graph)]
        return graph

    def __deepcopy__(self, _: object) -> Graph:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the function by its name, and the shapes: unpickling traces the model again."""
        params, args = self.model.example
        return self.trace, (self.model.fn, params, *args)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.parameters)} parameters, {len(self.uses)} uses, "
            f"{self.macs():,} MACs, {len(self.groups)} groups of channels)"
        )

    # Costs.

    def macs(self, masks: Masks | None = None) -> int:
        """Counts multiply-adds of all dots and convolutions of a call, at the traced batch size.

        The costliest branch of a `cond` counts, and one trip of a `while`.

        Args:
          masks: tree of masks, `None` for dense parameters: a product of a masked parameter costs
            its density. All are dense by default.

        Returns:
          The number of multiply-adds.
        """
        if masks is None:
            return self._dense_macs
        return round(self.costs.count_sparse_macs(self._compute_densities(masks)))

    @functools.cached_property
    def _dense_macs(self) -> int:
        # jax asks for the text of a graph in each call of an updater.
        return round(self.costs.count_sparse_macs({}))

    def _compute_densities(self, masks: Masks | None) -> dict[Path, Fraction]:
        """Returns the part of the entries that masks keep, for each masked parameter."""
        check_values("masks", masks, "Count multiply-adds outside of jit.")
        return {
            parameter.path: Fraction(int(np.count_nonzero(mask)), max(parameter.size, 1))
            for parameter, mask in self.parameters.match_masks(masks)
        }

    @property
    def uncounted(self) -> dict[str, str]:
        """Primitives whose multiply-adds do not count, each with the first line that uses them.

        Kernels (Pallas), sparse products (BCOO), calls of foreign code, Fourier transforms,
        decompositions and linear solvers.
        """
        return self.costs.uncounted

    def table(self, masks: Masks | None = None) -> str:
        """Returns a table of all parameters: shape, readers, contracted axes, MACs, channels.

        The last column gives the axes that can lose channels, and the indices of their groups. A
        line below names primitives whose multiply-adds do not count.

        Args:
          masks: tree of masks; with masks the table shows the MACs that are left, too.

        Returns:
          Text of several lines.
        """
        total, unread = self.macs(), self.macs()
        costs = ("MACs", "share") if masks is None else ("MACs", "left", "share")
        table = extras.make_table(("parameter", "shape", "read by", "contracts"), costs)
        table.add_column("axis: group")

        def add_row(texts: Sequence[str], dense: int, sparse: int, groups: str = "") -> None:
            macs = [f"{n:,}" for n in ((dense,) if masks is None else (dense, sparse))]
            table.add_row(*texts, *macs, f"{dense / max(total, 1):.1%}", groups)

        for parameter, dense, sparse in self._list_macs(masks):
            uses = [use for use in self.uses if use.path == parameter.path]
            kinds = dict.fromkeys(use.kind or "lookup" for use in uses)
            axes = sorted({axis for use in uses for axis in use.contracting})
            groups = sorted(
                (axis, index)
                for index, group in enumerate(self.groups)
                for path, axis in group.members
                if path == parameter.path
            )
            texts = trees.shape_text(parameter.shape), ", ".join(kinds) or "no product"
            add_row(
                (parameter.name, *texts, ", ".join(map(str, axes))),
                dense,
                sparse,
                ", ".join(f"{axis}: {n}" for axis, n in groups),
            )
            unread -= dense
        table.add_section()
        if unread > 0:  # multiply-adds of products that read no parameter
            add_row(("products of activations", "", "", ""), unread, unread)
        add_row(("dots and convolutions", "", "", ""), total, self.macs(masks))
        text = extras.as_text(table)
        if self.uncounted:
            names = [f"{name} {source}".rstrip() for name, source in self.uncounted.items()]
            text += f"\n\nNot counted: {', '.join(names)}."
        return text

    def plot(self, masks: Masks | None = None, ax: Axes | None = None) -> Axes:
        """Draws the multiply-adds of every parameter: dense in light, masked in dark.

        Args:
          masks: tree of masks, `None` for a dense model.
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        rows = [row for row in self._list_macs(masks) if row[1]]
        axes = pick_axes(ax, len(rows))
        names, dense = [parameter.name for parameter, _, _ in rows], [dense for _, dense, _ in rows]
        masked = None if masks is None else [sparse for _, _, sparse in rows]
        draw_bars(axes, "multiply-adds", names, dense, masked, self.macs())
        return axes

    def _list_macs(self, masks: Masks | None) -> list[tuple[Parameter, int, int]]:
        """Returns the parameters with the multiply-adds of their products, dense and masked."""
        density = self._compute_densities(masks)
        dense = [(x, self.costs.count_macs(x.path)) for x in self.parameters]
        return [(x, n, round(n * density.get(x.path, 1))) for x, n in dense]

    # For pruners.

    def is_weight(
        self,
        path: Path | None = None,
        param: chex.Array | None = None,
        *,
        min_inputs: int | None = None,
    ) -> PyTree:
        """Returns whether a dot or a convolution contracts the parameter: a `filter_fn`.

        Embeddings that are only looked up, scales, shifts and positional tables are not weights.
        `is_weight(min_inputs=64)` returns a `filter_fn` that leaves narrow weights dense, too: a
        3 x 3 convolution of an image has 27 inputs, a depthwise one 9.

        Args:
          path: path of the parameter.
          param: the parameter.
          min_inputs: smallest number of inputs of an output. For a convolution, this number is the
            input channels of a group times the window.
        """
        is_weight = WeightFilter(self, 1 if min_inputs is None else min_inputs)
        if (path is None) != (param is None):
            raise ValueError(
                "is_weight is a filter_fn(path, param): give both path and param, or min_inputs."
            )
        return is_weight if path is None or param is None else is_weight(path, param)

    def nm(
        self, n: int, m: int, *, otherwise: Literal["dense"] | None = None
    ) -> Callable[[Path, chex.Array], SparsityType | None]:
        """Returns N:M along the contracted axis of each parameter: a `sparsity_type`.

        The pattern takes the last contracted axis that m divides; for a convolution, that of the
        input channels. Parameters that no product contracts are unstructured.

        Args:
          n: number of weights kept of m consecutive ones.
          m: group size.
          otherwise: "dense" keeps all parameters dense that cannot have the pattern, whatever the
            distribution selects, in place of errors and of unstructured masks.

        Returns:
          A function of (path, param); it raises a ValueError that names the path if m divides none
          of its input channels, if groups of m would span several products (a reshape made a part
          of the axis an output), or if two products contract different axes.
        """
        return PatternAlongInputs(self, NByM(n, m), otherwise)

    def fan_in(
        self, group: int = 1, *, otherwise: Literal["dense"] | None = None
    ) -> Callable[[Path, chex.Array], SparsityType | None]:
        """Returns a `sparsity_type`: constant fan-in along all axes that products contract.

        For a convolution, these are the input channels and the window. Axes that index separate
        products count as outputs unless `batch_axes` of the pruner covers them. Parameters that
        no product contracts are unstructured.

        Args:
          group: neighbouring outputs that read the same inputs.
          otherwise: "dense" keeps all parameters dense that cannot have the pattern, whatever the
            distribution selects, in place of errors and of unstructured masks. A last group of
            fewer outputs fits.

        Returns:
          A function of (path, param) that returns a `FanIn`; it raises a ValueError that names the
          path if two products contract different axes, or if a reshape made a part of a contracted
          axis an output.
        """
        return PatternAlongInputs(self, FanIn(group), otherwise)

    # Channels.

    @property
    def groups(self) -> list[ChannelGroup]:
        """The channels that can be removed, in the order of the parameters."""
        return self.removal.channels.groups

    def group_table(self, importance: Mapping[str, np.ndarray] | None = None) -> str:
        """Returns a table of the groups by kind: channels, and what half of them would save.

        Savings are shares of the multiply-adds of a call and of the bytes of all parameters, if
        half of the channels go and all other groups stay whole.

        Args:
          importance: shows the least, median and largest importance of a channel, too: a result of
            `sparsity.rank_groups`.

        Example:
          >>> import jax.numpy as jnp
          >>> params = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 2))}
          >>> model = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
          >>> graph = trace(model, params, jnp.ones((5, 3)))
          >>> graph.group_table().split()[-5:]
          ['up:1', '8', '1', '50.0%', '50.0%']
        """
        importance = {} if importance is None else importance
        check_importance(self.groups, importance)
        columns = ["channels", "layers", "MACs saved", "bytes saved"]
        columns += ["least", "median", "largest"] if importance else []
        table = extras.make_table(("kind", "group"), columns)
        paths = {parameter.path for parameter in self.parameters}
        count_macs = self.costs.count_small_macs
        count_bytes = functools.partial(self.costs.count_small_bytes, paths=paths)
        for kind in dict.fromkeys(group.kind for group in self.groups):
            for group in (group for group in self.groups if group.kind == kind):
                half = {group.variable: Fraction(group.size, 2)}
                shares = [1 - f(half) / max(f({}), 1) for f in (count_macs, count_bytes)]
                sizes = f"{group.size:,}", str(group.layers or 1)
                numbers = importance.get(group.name)
                spread = [] if numbers is None else np.quantile(numbers, (0, 0.5, 1))
                texts = [f"{float(x):.1%}" for x in shares] + [f"{x:.3g}" for x in spread]
                table.add_row(kind, group.name, *sizes, *texts)
            table.add_section()
        return extras.as_text(table)

    # Depth.

    @functools.cached_property
    def blocks(self) -> list[ResidualBlock]:
        """The residual branches that may go, in blocks, in the order of the program.

        A branch is a function that is added to the stream that it reads. The layers of a scan come
        last, a block for each, named 'layers/0' and so on after the stack of their parameters.

        Example:
          >>> import jax.numpy as jnp
          >>> params = {f"layers/{i}": jnp.eye(4) for i in range(3)}
          >>> def model(params, x):
          ...     for i in range(3):
          ...         x = x + jnp.tanh(x) @ params[f"layers/{i}"]
          ...     return x
          >>> graph = trace(model, params, jnp.ones((2, 4)))
          >>> [block.name for block in graph.blocks]
          ['layers/0', 'layers/1', 'layers/2']
        """
        return [*self._unrolled_blocks, *(x for stack in self.stacks for x in stack.blocks)]

    @functools.cached_property
    def _unrolled_blocks(self) -> list[ResidualBlock]:
        return find_blocks(self.model, self.uses)

    @functools.cached_property
    def stacks(self) -> list[LayerStack]:
        """The scans whose layers can go one by one."""
        stacks = find_stacks(self.model, self.uses, self.removal.coupling)
        return [stack for stack in stacks if stack.variable not in self.removal.unproven]

    def drop(self, params: Tree, keys: str | Iterable[str]) -> Masks:
        """Returns masks without which blocks or branches are 0: `sparsity.shrink` cuts them.

        Args:
          params: tree of parameters.
          keys: names of blocks or branches, or patterns of names, such as 'layers.3' or '*attn*'.

        Raises:
          ValueError: a key is no block or branch of the model.
        """
        dropped: dict[Path, set[int | None]] = {}  # `None` for all of a parameter, or layers
        for branch in (x for branches in self.choose_branches(keys).values() for x in branches):
            for path in branch.paths:
                dropped.setdefault(path, set()).add(branch.layer)
        self.parameters.check_complete(params)
        leaves = self.parameters.match(params)

        def mask(key_path: KeyPath, param: jax.Array) -> jax.Array | None:
            layers = dropped.get(leaves[key_path].path) if key_path in leaves else None
            if layers is None:
                return None
            zeros = sharding.zeros_like(param, np.dtype(np.uint8))
            if None in layers:
                return zeros
            stays = np.array([layer not in layers for layer in range(len(param))])
            return sharding.place_like(param, zeros | stays.reshape(-1, *[1] * (param.ndim - 1)))

        return trees.map_matched(mask, params)

    def choose_branches(self, keys: str | Iterable[str]) -> dict[str, tuple[ResidualBranch, ...]]:
        """Returns {name: branches} of the blocks and of the single branches that keys name."""
        named = {block.name: block.branches for block in self.blocks}
        named |= {x.name: (x,) for block in self.blocks for x in block.branches}
        chosen: dict[str, tuple[ResidualBranch, ...]] = {}
        check_iterable("keys", keys)
        for key in [keys] if isinstance(keys, str) else keys:
            check_kind("each of keys", key, str, "the name of a block or a branch")
            matching = {x: named[x] for x in named if fnmatch.fnmatchcase(x, key)}
            if not matching:
                raise ValueError(f"keys: {key!r} is no block of the model. {suggest(key, named)}")
            chosen |= matching
        return chosen

    @functools.cached_property
    def compare_streams(self) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """A program from the leaves of params and inputs to the distance of each block's ends.

        A distance is 1 - the mean cosine of the streams before and after the block.
        """
        blocks = self._unrolled_blocks, self.stacks
        return jax.jit(functools.partial(compare_streams, self.model, *blocks))

    @property
    def refused(self) -> list[Refusal]:
        """The axes that cannot lose channels, in the order of the parameters.

        Windows of convolutions, and the positions of an image that is flattened with its channels,
        are not channels and are left out.
        """
        return self.removal.channels.refused
