"""The graph of a model: what `sparsity.trace` returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.polynomials import Polynomial
from sparsity.core.trees import PyTree
from sparsity.graph import costs, report
from sparsity.graph.biases import find_biases
from sparsity.graph.channels import ChannelGroup, Leaf, Refusal, find_channels, positions
from sparsity.graph.coupling import TABLES, Coupling
from sparsity.graph.layers import layered
from sparsity.graph.proof import Proof
from sparsity.graph.uses import Path, Tracker, Use
from sparsity.patterns import FanIn, NByM, SparsityType, Unstructured
from sparsity.programs.axes import Axis, Reason
from sparsity.programs.products import NO_PRODUCTS, PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, values_read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_RETRACED = 15  # graphs for other arguments that are kept
N = TypeVar("N", int, Fraction, Polynomial)  # how many entries are left


class Graph:
    """What a model does with every weight. Made by `sparsity.trace`.

    Attributes:
      leaves: its parameters, in tree order.
      uses: every product, convolution and lookup that reads one.
      state: what the model returns for its next call: {path in the output: path in params}.

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

    def __init__(
        self,
        program: Program,
        leaves: Sequence[Leaf],
        carried: Mapping[int, int],
        outputs: Sequence[Path],
        output_tree: jax.tree_util.PyTreeDef,
        fn: Callable[..., PyTree],
        example: tuple[PyTree, tuple[PyTree, ...]],
        retrace: Callable[[Callable[..., PyTree], PyTree, tuple[PyTree, ...]], Graph],
    ) -> None:
        self.program, self.leaves = program, list(leaves)
        self.carried, self.output_tree = dict(carried), output_tree
        self._fn, self._example, self._retrace = fn, example, retrace
        self._retraced: list[tuple[PyTree, Graph]] = []
        self._by_end: dict[Path, list[Leaf]] = {}  # by what paths end in, the shortest path first
        for leaf in sorted(self.leaves, key=lambda leaf: len(leaf.path)):
            for start in range(len(leaf.path) + 1):
                self._by_end.setdefault(leaf.path[start:], []).append(leaf)
        self.state = {outputs[i]: leaves[number].path for i, number in carried.items()}
        values = program.inputs[: len(self.leaves)]
        self._values = dict(zip(values, range(len(values)), strict=True))
        self._tracker = Tracker(program, self._values, [leaf.path for leaf in self.leaves])
        self.uses = self._tracker.uses

    def __deepcopy__(self, _: object) -> Graph:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """A pickle holds the function, by its name, and the shapes: the model is traced again."""
        return self._retrace, (self._fn, *self._example)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.leaves)} leaves, {len(self.uses)} uses, {self.macs():,} MACs, "
            f"{len(self.groups)} groups of channels)"
        )

    # Costs.

    def macs(self, masks: PyTree | None = None) -> int:
        """Multiply-adds of all dots and convolutions of a call, a batch as it was traced.

        Of branches the costliest counts, of a `while` one trip.

        Args:
          masks: tree of masks, `None` for dense leaves: a product of a masked leaf costs its
            density. All are dense by default.
        """
        macs: Fraction = self.cost(self.densities(masks))
        return round(macs)

    def cost(self, density: Mapping[Path, N]) -> N:
        """Multiply-adds if of some leaves only a part of the entries counts."""
        readers: dict[Equation, list[Use]] = {}
        for use in self.uses:
            if use.primitive in PRODUCTS:
                readers.setdefault(use.equation, []).append(use)

        def macs(product: Equation) -> costs.Number:
            uses = readers.get(product, ())
            one, other = ([use for use in uses if use.operand == i] for i in range(2))
            return read_product(product).macs * _density(one, density) * _density(other, density)

        total: N = costs.cost(self.program, macs)
        return total

    def macs_left(self, left: Mapping[Axis, N], path: Path | None = None) -> N:
        """Multiply-adds if only so many entries are left of some axes; of one leaf's products."""
        of_product = costs.macs_left(self.coupling, left)
        found: N
        if path is None:
            found = costs.cost(self.program, of_product)
        else:
            found = sum(
                (1 if use.trips is None else use.trips) * use.view.share * of_product(use.equation)
                for use in self._by_product(path)
            )
        return found

    def bytes_left(self, left: Mapping[Axis, N], paths: Container[Path]) -> N:
        """Bytes of some leaves if only so many entries are left of some axes."""
        found: N = sum(
            costs.entries_left(dims, left) * leaf.dtype.itemsize
            for leaf, dims in self.axes()
            if leaf.path in paths
        )
        return found

    def shape_of(self, path: Path) -> tuple[int, ...]:
        """The shape of a leaf."""
        return self._by_end[path][0].shape

    def macs_of(self, path: Path) -> int:
        """Multiply-adds of all products of a leaf; those that read it twice count once."""
        return sum(use.macs for use in self._by_product(path))

    def densities(self, masks: PyTree | None) -> dict[Path, Fraction]:
        """The part of the entries that masks keep of each leaf that has one."""
        found = {}
        for key, mask in trees.leaves_by_path(masks).items():
            leaf = self.leaf(trees.path_names(key), mask, "masks")
            found[leaf.path] = Fraction(int(np.count_nonzero(np.asarray(mask))), max(leaf.size, 1))
        return found

    @functools.cached_property
    def uncounted(self) -> dict[str, str]:
        """Primitives whose multiply-adds do not count, each with the first line that uses it.

        Kernels (Pallas), sparse products (BCOO), calls of foreign code, decompositions.
        """
        programs = [self.program]
        sources: dict[str, str] = {}
        for program in programs:  # grows by the bodies that are found
            for equation in program.flat():
                programs += equation.bodies
                tables = (*TABLES, NO_PRODUCTS)
                if not equation.bodies and not any(equation.name in names for names in tables):
                    sources.setdefault(equation.name, equation.source)
        return sources

    def table(self, masks: PyTree | None = None) -> str:
        """Returns a table of all leaves: shape, what reads it, contracted axes, MACs, channels.

        The last column gives the axes that can lose channels, and their groups, by number. A line
        below names primitives whose multiply-adds do not count.

        Args:
          masks: tree of masks; with it the table shows what they leave of the MACs.

        Returns:
          Text of several lines.
        """
        left = None if masks is None else self.macs(masks)
        return report.table(self._rows(masks), self.macs(), left, self.uncounted)

    def plot(self, masks: PyTree | None = None, ax: Axes | None = None) -> Axes:
        """Draws the multiply-adds of every leaf: dense in light, what masks leave in dark.

        Args:
          masks: tree of masks, `None` for a dense model.
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        return report.plot(self._rows(masks), self.macs(), masks is not None, ax)

    def _rows(self, masks: PyTree | None) -> list[report.Row]:
        """What tables and pictures show of each leaf, in tree order."""
        density, rows = self.densities(masks), []
        for leaf in self.leaves:
            uses = [use for use in self.uses if use.path == leaf.path]
            axes = {axis for use in uses for axis in use.contracting}
            groups = [
                (axis, number)
                for number, group in enumerate(self.groups)
                for path, axis in group.members
                if path == leaf.path
            ]
            dense = self.macs_of(leaf.path)
            left = round(dense * density.get(leaf.path, 1))
            names = tuple(dict.fromkeys(use.primitive for use in uses))
            row = report.Row(leaf, names, tuple(sorted(axes)), dense, left, tuple(sorted(groups)))
            rows.append(row)
        return rows

    # For pruners.

    def is_weight(self, path: Path, param: chex.Array) -> bool:
        """Whether a dot or a convolution contracts the leaf: a `filter_fn`.

        Embeddings that are only looked up, scales, shifts and positional tables are no weights.
        """
        leaf = self.leaf(path, param, may_be_smaller=True)
        return any(use.contracting for use in self.products(leaf.path))

    def nm(self, n: int, m: int) -> Callable[[Path, chex.Array], SparsityType]:
        """N:M along the axis that each leaf's products contract: a `sparsity_type`.

        The last contracted axis that m divides is taken, of a convolution the input channels.
        Leaves that no product contracts are unstructured.

        Args:
          n: how many of m consecutive weights stay.
          m: group size.

        Returns:
          A function of (path, param); it raises a ValueError that names the leaf if m divides none
          of its input channels, if groups of m would lie across a product (a reshape made a part of
          the axis an output), or if two products contract different axes.
        """

        return AlongInputs(self, n, m)

    def fan_in(self, group: int = 1) -> Callable[[Path, chex.Array], SparsityType]:
        """Constant fan-in along all axes that each leaf's products contract: a `sparsity_type`.

        Of a convolution these are the input channels and the window. Axes that index separate
        products count as outputs unless `batch_axes` of the pruner covers them. Leaves that no
        product contracts are unstructured.

        Args:
          group: neighbouring outputs that read the same inputs.

        Returns:
          A function of (path, param) that returns a `FanIn`; it raises a ValueError that names the
          leaf if two products contract different axes, or if a reshape made a part of a contracted
          axis an output.
        """

        return SharedInputs(self, group)

    def products(self, path: Path) -> list[Use]:
        """The dots and convolutions that read a leaf."""
        return [use for use in self.uses if use.path == path and use.primitive in PRODUCTS]

    def _by_product(self, path: Path) -> list[Use]:
        """For each product that reads a leaf, the use of the largest part of it."""
        largest: dict[Equation, Use] = {}
        for use in self.products(path):
            other = largest.setdefault(use.equation, use)
            if use.view.share > other.view.share:
                largest[use.equation] = use
        return list(largest.values())

    def leaf(
        self, path: Path, array: object, role: str = "params", may_be_smaller: bool = False
    ) -> Leaf:
        """The leaf of a path; of a tree that is a part of what was traced, of the path's end.

        Of leaves whose paths end alike, that with the shortest path is meant: of a part such as
        `variables["params"]`, `a/w` is `params/a/w` rather than `params/layer/a/w`. An array of a
        smaller model may be smaller along axes that can lose channels, if this is allowed.

        Raises:
          ValueError: there is no such leaf, more than one, or one of another shape than the array.
        """
        shape = tuple(getattr(array, "shape", ()))
        ends = self._by_end.get(path, [])
        found = [leaf for leaf in ends if len(leaf.path) == len(ends[0].path)]
        if len(found) != 1:
            raise ValueError(
                f"The {role} have a leaf {'/'.join(path)!r} of shape {shape}, of which the graph "
                f"has {len(found)}: it knows {trees.listed([x.name for x in self.leaves])}."
            )
        if found[0].shape != shape and not (may_be_smaller and self._fits(found[0], shape)):
            remedy = "Trace the model with these parameters."
            if role == "masks":
                remedy = "Unpack packed masks: sparsity.unpack_masks(masks, params)."
            raise ValueError(
                f"The {role} have shape {shape} at {'/'.join(path)!r}, the graph was traced with "
                f"{found[0].shape}. {remedy}"
            )
        return found[0]

    def _fits(self, leaf: Leaf, shape: tuple[int, ...]) -> bool:
        """Whether a leaf may have this shape in a smaller model."""
        cut = {axis for x in self.groups for path, axis in x.members if path == leaf.path}
        return len(shape) == len(leaf.shape) and all(
            new == old or (axis in cut and 0 < new < old)
            for axis, (new, old) in enumerate(zip(shape, leaf.shape, strict=True))
        )

    def leaves_of(self, tree: PyTree) -> dict[trees.KeyPath, Leaf]:
        """The leaves that the arrays of a tree of params are, by the paths of the tree.

        The params may be those of a smaller model.
        """
        return {
            path: self.leaf(trees.path_names(path), array, may_be_smaller=True)
            for path, array in trees.leaves_by_path(tree).items()
            if hasattr(array, "shape")
        }

    def retraced(self, params: PyTree, *args: PyTree) -> Graph:
        """The graph of the model for these arguments; itself if they are like those of the trace.

        Arguments are alike if their trees, their shapes and dtypes, and the leaves that are no
        arrays (flags, numbers, functions) are.

        Args:
          params: the parameters, in other dtypes or containers, perhaps.
          *args: inputs of the model.
        """
        example = sharding.abstract((params, args))
        if trees.are_alike(example, self._example):
            return self
        for earlier, graph in self._retraced:
            if trees.are_alike(example, earlier):
                return graph
        graph = self._retrace(self._fn, *example)
        # A number that changes from call to call must not fill the memory.
        self._retraced = [*self._retraced[-_MOST_RETRACED:], (example, graph)]
        return graph

    def at_shapes(self, fn: Callable[..., PyTree], shapes: Mapping[Path, tuple[int, ...]]) -> Graph:
        """The graph of a function like the model, at other shapes of its parameters."""
        params, args = self._example
        arrays, rebuild = trees.split_arrays(params)
        leaves = zip(arrays, self.leaves, strict=True)
        structs = [sharding.resized(array, shapes[leaf.path]) for array, leaf in leaves]
        return self._retrace(fn, rebuild(structs), args)

    def resized(self, sizes: Mapping[Axis, int]) -> list[ChannelGroup]:
        """The groups of channels in a smaller model, where so many entries are left of some axes.

        There is one for each group of this model, in the same order, even if one channel is left.
        """
        if not sizes:
            return self.groups
        dims = {leaf.path: of_leaf for leaf, of_leaf in self.axes()}
        return [
            dataclasses.replace(
                group,
                size=sizes.get(group.variable, group.size),
                positions=tuple(
                    positions(dims[path][axis], group.variable, sizes)
                    for path, axis in group.members
                ),
            )
            for group in self.groups
        ]

    # Channels.

    def axes(self) -> list[tuple[Leaf, list[Axis]]]:
        """The leaves with their axes."""
        return [(self.leaves[i], self.coupling.axes(v)) for v, i in self._values.items()]

    @functools.cached_property
    def coupling(self) -> Coupling:
        """The axes of all values."""
        read_values = values_read(self.program)
        coupling = Coupling(self.program, self._values, self.carried)
        for value in self._values:
            if value not in read_values:
                coupling.pin(value, Reason(None, "no operation reads it", "unread"))
        return coupling

    @functools.cached_property
    def groups(self) -> list[ChannelGroup]:
        """The channels that can be removed, in the order of the leaves."""
        return self._channels[0]

    @functools.cached_property
    def refused(self) -> list[Refusal]:
        """The axes that cannot lose entries, in the order of the leaves."""
        return self._channels[1]

    @functools.cached_property
    def biases(self) -> dict[Path, Path]:
        """The leaf that is added to the outputs of a weight, and to nothing else, by weight."""
        return find_biases(self.program, self._values, self._tracker)

    def unproven(self, masked: Sequence[Path]) -> dict[Axis, Reason]:
        """The axes whose removal differs from masking these leaves, and why."""
        chosen = set(masked)
        values = [v for v, i in self._values.items() if self.leaves[i].path in chosen]
        return Proof(self.program, self.coupling, values).refused

    @functools.cached_property
    def _channels(self) -> tuple[list[ChannelGroup], list[Refusal]]:
        inputs, outputs = self.program.inputs, self.program.outputs
        carried = {leaf for i, leaf in self.carried.items() if outputs[i] is not inputs[leaf]}
        masked = [
            leaf.path
            for i, leaf in enumerate(self.leaves)
            if i not in carried and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        made: dict[Path, set[int]] = {}
        for use in self.uses:
            if use.primitive in PRODUCTS:
                made.setdefault(use.path, set()).update(use.output)
        layers = layered(self.program, self.coupling)
        return find_channels(self.axes(), self.unproven(masked), made, layers)


@dataclasses.dataclass(frozen=True)
class AlongInputs:
    """N:M along the axis that each leaf's products contract. Made by `Graph.nm`.

    Attributes:
      graph: of the model.
      n: how many of m consecutive weights stay.
      m: group size.
    """

    graph: Graph
    n: int
    m: int

    def __post_init__(self) -> None:
        NByM(self.n, self.m)  # which checks them

    def __call__(self, path: Path, param: chex.Array) -> SparsityType:
        """Returns the pattern of a leaf, or of that of a smaller model."""
        leaf, m = self.graph.leaf(path, param, may_be_smaller=True), self.m
        uses = [use for use in self.graph.products(leaf.path) if use.contracting]
        axes = {use.channels for use in uses}
        if not axes:
            return Unstructured()
        shown = f"{leaf.name!r} of shape {param.shape}"
        if len(axes) > 1:
            raise ValueError(
                f"Products contract different axes {sorted(axes)} of {shown}, so that no axis "
                "serves N:M. Leave it out with filter_fn."
            )
        (channels,) = axes
        sizes = ", ".join(f"axis {axis} of size {param.shape[axis]}" for axis in channels)
        divided = [axis for axis in channels if param.shape[axis] % m == 0]
        fitting = [axis for axis in divided if all(use.is_along(axis, m) for use in uses)]
        if not fitting:
            why = f"{m} divides none of the input channels of {shown}: {sizes}"
            if divided:
                why = f"Groups of {m} input channels of {shown} ({sizes}) lie across a reshape"
            raise ValueError(
                f"{why}. Leave it out with filter_fn, or choose another m. The window of a "
                "convolution holds no input channels."
            )
        # From the end: it is the same axis of a slice, whatever the batch axes.
        return NByM(self.n, m, axis=fitting[-1] - len(param.shape))


@dataclasses.dataclass(frozen=True)
class SharedInputs:
    """`FanIn` along the axes that each leaf's products contract. Made by `Graph.fan_in`.

    Attributes:
      graph: of the model.
      group: neighbouring outputs that read the same inputs.
    """

    graph: Graph
    group: int

    def __post_init__(self) -> None:
        FanIn(self.group)  # which checks it

    def __call__(self, path: Path, param: chex.Array) -> SparsityType:
        """Returns the pattern of a leaf, or of that of a smaller model."""
        leaf = self.graph.leaf(path, param, may_be_smaller=True)
        uses = [use for use in self.graph.products(leaf.path) if use.contracting]
        axes = {tuple(sorted(use.contracting)) for use in uses}
        if not axes:
            return Unstructured()
        shown = f"{leaf.name!r} of shape {param.shape}"
        if len(axes) > 1:
            raise ValueError(
                f"Products contract different axes {sorted(axes)} of {shown}, so that no axes "
                "serve FanIn. Leave it out with filter_fn."
            )
        (inputs,) = axes
        for axis in inputs:
            if not all(use.is_along(axis, leaf.shape[axis]) for use in uses):
                raise ValueError(
                    f"Products contract a part of axis {axis} of {shown}, which a reshape took "
                    "apart, so that no axes serve FanIn. Leave it out with filter_fn."
                )
        # From the end: they are the same axes of a slice, whatever the batch axes.
        return FanIn(self.group, tuple(axis - len(param.shape) for axis in inputs))


def _density(uses: Sequence[Use], density: Mapping[Path, costs.Number]) -> costs.Number:
    """The part of the entries of an operand that may differ from 0.

    Leaves that were joined add up. Of those that were multiplied each bounds the others: one that
    has a density counts.
    """
    total: costs.Number = Fraction(0)
    free = Fraction(1)  # the part of the operand that no leaf before has
    for use in sorted(uses, key=lambda use: use.path not in density or not use.view.keeps_zeros):
        share = min(use.view.share, free)
        free -= share
        part = density.get(use.path, Fraction(1)) if use.view.keeps_zeros else Fraction(1)
        total = total + part * share
    return total + free if free else total
