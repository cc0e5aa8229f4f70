"""The graph of a model, which `sparsity.trace` returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.polynomials import Polynomial
from sparsity.core.trees import Path, PyTree
from sparsity.graph import costs, report
from sparsity.graph.alike import Alike
from sparsity.graph.biases import Bias, find_biases
from sparsity.graph.channels import ChannelGroup, Parameter, Refusal, find_channels
from sparsity.graph.coupling import TABLES, Coupling
from sparsity.graph.inputs import AlongInputs, SharedInputs, Weights
from sparsity.graph.layers import layered
from sparsity.graph.proof import Proof, Proven
from sparsity.graph.uses import Tracker, Use
from sparsity.patterns import SparsityType
from sparsity.programs.axes import Axis, Reason, variables
from sparsity.programs.products import NO_PRODUCTS, PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value, values_read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_RETRACED = 15  # graphs for other arguments that are kept
N = TypeVar("N", int, Fraction, Polynomial)  # a number of entries


class Graph:
    """Graph of a model: uses, costs and coupled channels of its weights. Made by `sparsity.trace`.

    Attributes:
      leaves: the parameters, in tree order.
      uses: every product, convolution and lookup that reads a parameter.
      state: outputs that the next call reads: {path in the output: path in params}.

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
        leaves: Sequence[Parameter],
        carried: Mapping[int, int],
        outputs: Sequence[Path],
        output_tree: jax.tree_util.PyTreeDef,
        fn: Callable[..., PyTree],
        example: tuple[PyTree, tuple[PyTree, ...]],
        retrace: Callable[[Callable[..., PyTree], PyTree, tuple[PyTree, ...]], Graph],
    ) -> None:
        self.program, self.leaves = program, list(leaves)
        self.carried, self.output_tree = dict(carried), output_tree
        self._fn, self._example, self._trace = fn, example, retrace
        self._traces: list[tuple[PyTree, Graph]] = []
        self._proofs: dict[frozenset[tuple[object, ...]], Proven] = {}
        self._by_end: dict[
            Path, list[Parameter]
        ] = {}  # {end of paths: parameters, shortest path first}
        for leaf in sorted(self.leaves, key=lambda leaf: len(leaf.path)):
            for start in range(len(leaf.path) + 1):
                self._by_end.setdefault(leaf.path[start:], []).append(leaf)
        self.state = {outputs[i]: leaves[number].path for i, number in carried.items()}
        values = program.inputs[: len(self.leaves)]
        self._values = dict(zip(values, range(len(values)), strict=True))
        self._tracker = Tracker(program, self._values, [leaf.path for leaf in self.leaves])
        self.uses = self._tracker.uses

    @property
    def example(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Shapes and dtypes of the parameters and of the inputs that were traced."""
        return self._example

    def __deepcopy__(self, _: object) -> Graph:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the function by its name, and the shapes: unpickling traces the model again."""
        return self._trace, (self._fn, *self._example)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.leaves)} leaves, {len(self.uses)} uses, {self.macs():,} MACs, "
            f"{len(self.groups)} groups of channels)"
        )

    # Costs.

    def macs(self, masks: PyTree | None = None) -> int:
        """Counts multiply-adds of all dots and convolutions of a call, at the traced batch size.

        The costliest branch of a `cond` counts, and one trip of a `while`.

        Args:
          masks: tree of masks, `None` for dense leaves: a product of a masked parameter costs
            its density. All parameters are dense by default.

        Returns:
          The number of multiply-adds.
        """
        macs: Fraction = self.count_sparse_macs(self._densities(masks))
        return round(macs)

    def count_sparse_macs(self, density: Mapping[Path, N]) -> N:
        """Counts multiply-adds if only a part of the entries of some parameters differs from 0."""
        readers: dict[Equation, list[Use]] = {}
        for use in self.uses:
            if use.primitive in PRODUCTS:
                readers.setdefault(use.equation, []).append(use)

        def macs(product: Equation) -> costs.Number:
            uses = readers.get(product, ())
            lhs, rhs = ([use for use in uses if use.operand == i] for i in range(2))
            return read_product(product).macs * _density(lhs, density) * _density(rhs, density)

        total: N = costs.sum_products(self.program, macs)
        return total

    def count_small_macs(self, sizes: Mapping[Axis, N], path: Path | None = None) -> N:
        """Counts multiply-adds at smaller sizes of some axes: of a call, or of one parameter."""
        count = costs.product_counter(self.coupling, sizes)
        macs: N
        if path is None:
            macs = costs.sum_products(self.program, count)
        else:
            macs = sum(
                (1 if use.trips is None else use.trips) * use.view.share * count(use.equation)
                for use in self._by_product(path)
            )
        return macs

    def count_small_bytes(self, sizes: Mapping[Axis, N], paths: Container[Path]) -> N:
        """Counts bytes of some parameters at smaller sizes of some axes."""
        nbytes: N = sum(
            costs.multiply_sizes(dims, sizes) * leaf.dtype.itemsize
            for leaf, dims in self.list_axes()
            if leaf.path in paths
        )
        return nbytes

    def find_shape(self, path: Path) -> tuple[int, ...]:
        """Returns the shape of a parameter."""
        return self._by_end[path][0].shape

    def count_macs(self, path: Path) -> int:
        """Counts multiply-adds of all products of a parameter; each product counts once."""
        return sum(use.macs for use in self._by_product(path))

    def _densities(self, masks: PyTree | None) -> dict[Path, Fraction]:
        """Returns the part of the entries that masks keep, for each masked parameter."""
        return {
            leaf.path: Fraction(int(np.count_nonzero(np.asarray(mask))), max(leaf.size, 1))
            for leaf, mask in self.match_masks(masks)
        }

    @functools.cached_property
    def uncounted(self) -> dict[str, str]:
        """Primitives whose multiply-adds do not count, each with the first line that uses them.

        Kernels (Pallas), sparse products (BCOO), calls of foreign code, decompositions.
        """
        programs = [self.program]
        sources: dict[str, str] = {}
        for program in programs:  # grows by the bodies of its equations
            for equation in program.flat():
                programs += equation.bodies
                tables = (*TABLES, NO_PRODUCTS)
                if not equation.bodies and not any(equation.name in names for names in tables):
                    sources.setdefault(equation.name, equation.source)
        return sources

    def table(self, masks: PyTree | None = None) -> str:
        """Returns a table of all parameters: shape, readers, contracted axes, MACs, channels.

        The last column gives the axes that can lose channels, and the numbers of their groups. A
        line below names primitives whose multiply-adds do not count.

        Args:
          masks: tree of masks; with masks the table shows the MACs that are left, too.

        Returns:
          Text of several lines.
        """
        masked = None if masks is None else self.macs(masks)
        return report.table(self._rows(masks), self.macs(), masked, self.uncounted)

    def plot(self, masks: PyTree | None = None, ax: Axes | None = None) -> Axes:
        """Draws the multiply-adds of every parameter: dense in light, masked in dark.

        Args:
          masks: tree of masks, `None` for a dense model.
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        return report.plot(self._rows(masks), self.macs(), masks is not None, ax)

    def _rows(self, masks: PyTree | None) -> list[report.CostRow]:
        """Returns the rows of tables and pictures, in tree order."""
        density, rows = self._densities(masks), []
        for leaf in self.leaves:
            uses = [use for use in self.uses if use.path == leaf.path]
            axes = {axis for use in uses for axis in use.contracting}
            groups = [
                (axis, number)
                for number, group in enumerate(self.groups)
                for path, axis in group.members
                if path == leaf.path
            ]
            dense = self.count_macs(leaf.path)
            masked = round(dense * density.get(leaf.path, 1))
            names = tuple(dict.fromkeys(use.primitive for use in uses))
            row = report.CostRow(
                leaf, names, tuple(sorted(axes)), dense, masked, tuple(sorted(groups))
            )
            rows.append(row)
        return rows

    # For pruners.

    @overload
    def is_weight(self, path: Path, param: chex.Array) -> bool: ...

    @overload
    def is_weight(self, *, min_inputs: int) -> Callable[[Path, chex.Array], bool]: ...

    def is_weight(
        self,
        path: Path | None = None,
        param: chex.Array | None = None,
        *,
        min_inputs: int | None = None,
    ) -> bool | Callable[[Path, chex.Array], bool]:
        """Returns whether a dot or a convolution contracts the parameter: a `filter_fn`.

        Embeddings that are only looked up, scales, shifts and positional tables are no weights.
        `is_weight(min_inputs=64)` returns a `filter_fn` that leaves narrow weights dense, too: a
        3 x 3 convolution of an image has 27 inputs, a depthwise one 9.

        Args:
          path: path of the parameter.
          param: the parameter.
          min_inputs: smallest number of inputs of an output. Of a convolution these are the input
            channels of a group times the window.
        """
        if min_inputs is not None:
            return Weights(self, min_inputs)
        if path is None or param is None:
            raise ValueError(
                "is_weight is a filter_fn(path, param), or is_weight(min_inputs=n) returns one: "
                "give both path and param, or min_inputs."
            )
        return Weights(self, 1)(path, param)

    def nm(
        self, n: int, m: int, *, otherwise: Literal["dense"] | None = None
    ) -> Callable[[Path, chex.Array], SparsityType | None]:
        """Returns N:M along the contracted axis of each parameter: a `sparsity_type`.

        The pattern takes the last contracted axis that m divides, of a convolution the input
        channels. Parameters that no product contracts are unstructured.

        Args:
          n: number of weights that stay of m consecutive ones.
          m: group size.
          otherwise: "dense" keeps all parameters dense that cannot have the pattern, whatever the
            distribution selects, in place of errors and of unstructured masks.

        Returns:
          A function of (path, param); it raises a ValueError that names the path if m divides none
          of its input channels, if groups of m would lie across a product (a reshape made a part of
          the axis an output), or if two products contract different axes.
        """
        return AlongInputs(self, n, m, otherwise=otherwise)

    def fan_in(
        self, group: int = 1, *, otherwise: Literal["dense"] | None = None
    ) -> Callable[[Path, chex.Array], SparsityType | None]:
        """Returns a `sparsity_type`: constant fan-in along all axes that products contract.

        Of a convolution these are the input channels and the window. Axes that index separate
        products count as outputs unless `batch_axes` of the pruner covers them. Leaves that no
        product contracts are unstructured.

        Args:
          group: neighbouring outputs that read the same inputs.
          otherwise: "dense" keeps all leaves dense that cannot have the pattern, whatever the
            distribution selects, in place of errors and of unstructured masks. A last group of
            fewer outputs fits.

        Returns:
          A function of (path, param) that returns a `FanIn`; it raises a ValueError that names the
          leaf if two products contract different axes, or if a reshape made a part of a contracted
          axis an output.
        """
        return SharedInputs(self, group, otherwise=otherwise)

    def find_products(self, path: Path) -> list[Use]:
        """Returns the dots and convolutions that read a parameter."""
        return [use for use in self.uses if use.path == path and use.primitive in PRODUCTS]

    def find_scanned_axes(self) -> dict[Path, tuple[int, ...]]:
        """Returns {path: axes of the parameter that are layers of scans, the outermost first}."""
        axes: dict[Path, tuple[int, ...]] = {}
        for fact in self._tracker.facts.values():
            for view in fact.views:
                path, scanned = self.leaves[view.leaf].path, view.stacked[: len(view.scans)]
                if len(scanned) > len(axes.get(path, ())):
                    axes[path] = scanned
        return axes

    def is_data(self, value: Value) -> bool:
        """Returns whether a value of the program depends on more than parameters."""
        return self._tracker.fact(value).is_data

    def _by_product(self, path: Path) -> list[Use]:
        """Returns one use for each product of a parameter: that of the largest part."""
        largest: dict[Equation, Use] = {}
        for use in self.find_products(path):
            other = largest.setdefault(use.equation, use)
            if use.view.share > other.view.share:
                largest[use.equation] = use
        return list(largest.values())

    def find_parameter(
        self, path: Path, array: object, role: str = "params", may_be_smaller: bool = False
    ) -> Parameter:
        """Returns the parameter of a path, in the traced tree or in a part of that tree.

        The path may lack the first names of the traced path. The shortest traced path wins: in
        `variables["params"]`, `a/w` is `params/a/w` rather than `params/layer/a/w`.

        Args:
          path: path of the array.
          array: the array.
          role: the name of the tree in errors.
          may_be_smaller: allow the smaller shapes of a model that has lost channels.

        Raises:
          ValueError: no parameter or several have this path, or the shape differs.
        """
        shape = tuple(getattr(array, "shape", ()))
        ends = self._by_end.get(path, [])
        matches = [leaf for leaf in ends if len(leaf.path) == len(ends[0].path)]
        if len(matches) != 1:
            raise ValueError(
                f"The {role} have a leaf {trees.join_names(path)!r} of shape {shape}, of which the "
                f"graph has {len(matches)}: it knows {trees.listed([x.name for x in self.leaves])}."
            )
        leaf = matches[0]
        if leaf.shape != shape and not (may_be_smaller and self._fits(leaf, shape)):
            remedy = "Trace the model with these parameters."
            if role == "masks":
                remedy = "Unpack packed masks: sparsity.unpack_masks(masks, params)."
            raise ValueError(
                f"The {role} have shape {shape} at {trees.join_names(path)!r}, the graph was "
                f"traced with {leaf.shape}. {remedy}"
            )
        return leaf

    def _fits(self, leaf: Parameter, shape: tuple[int, ...]) -> bool:
        """Returns whether a parameter may have this shape in a smaller model."""
        cut = {axis for x in self.groups for path, axis in x.members if path == leaf.path}
        return len(shape) == len(leaf.shape) and all(
            new == old or (axis in cut and 0 < new < old)
            for axis, (new, old) in enumerate(zip(shape, leaf.shape, strict=True))
        )

    def match_masks(self, masks: PyTree) -> list[tuple[Parameter, PyTree]]:
        """Returns the masks with their parameters, without those that are `None`.

        Raises:
          ValueError: a mask belongs to no parameter, or has another shape; the error names both.
        """
        return [
            (self.find_parameter(trees.path_names(path), mask, "masks"), mask)
            for path, mask in trees.leaves_by_path(masks).items()
        ]

    def match_parameters(self, tree: PyTree) -> dict[trees.KeyPath, Parameter]:
        """Returns {path in the tree: parameter} for a tree of params.

        The params may be those of a smaller model.
        """
        matched = {
            path: self.find_parameter(trees.path_names(path), array, may_be_smaller=True)
            for path, array in trees.leaves_by_path(tree).items()
            if hasattr(array, "shape")
        }
        if self.leaves and not matched:
            raise ValueError(
                "The params have no array that the graph knows: it knows "
                f"{trees.listed([leaf.name for leaf in self.leaves])}."
            )
        return matched

    def retrace(self, params: PyTree, *args: PyTree) -> Graph:
        """Returns the graph of the model for other arguments, or this graph if they are alike.

        Arguments are alike if trees, shapes, dtypes and all leaves that are no arrays (flags,
        numbers, functions) are equal.

        Args:
          params: the parameters; dtypes and containers may differ from those of the trace.
          *args: inputs of the model.
        """
        example = sharding.abstract((params, args))
        if trees.are_alike(example, self._example):
            return self
        for earlier, graph in self._traces:
            if trees.are_alike(example, earlier):
                return graph
        graph = self._trace(self._fn, *example)
        # A number that changes from call to call must not fill the memory.
        self._traces = [*self._traces[-_MOST_RETRACED:], (example, graph)]
        return graph

    def trace_at_shapes(
        self, fn: Callable[..., PyTree], shapes: Mapping[Path, tuple[int, ...]]
    ) -> Graph:
        """Returns the graph of a function like the model, at other shapes of the parameters."""
        params, args = self._example
        arrays, rebuild = trees.split_arrays(params)
        leaves = zip(arrays, self.leaves, strict=True)
        structs = [sharding.resized(array, shapes[leaf.path]) for array, leaf in leaves]
        return self._trace(fn, rebuild(structs), args)

    # Channels.

    def list_axes(self) -> list[tuple[Parameter, list[Axis]]]:
        """Returns the parameters with their axes."""
        return [(self.leaves[i], self.coupling.axes(v)) for v, i in self._values.items()]

    @functools.cached_property
    def coupling(self) -> Coupling:
        """The axes of all values of the program."""
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
        """The axes that cannot lose channels, in the order of the leaves.

        Windows of convolutions, and the positions of an image that is flattened with its channels,
        are no channels and are left out.
        """
        return self._channels[1]

    @functools.cached_property
    def biases(self) -> dict[Path, Bias]:
        """{weight: parameter that shifts the outputs of the weight, and nothing else}."""
        return find_biases(self.program, self._values, self._tracker)

    def reader(self, arrays: Mapping[Path, jax.Array]) -> Callable[[Value], jax.Array]:
        """Returns a function that computes values of the program from parameters alone.

        Args:
          arrays: the parameters by path.

        Raises:
          ValueError: the function needs a parameter that is missing or of another shape.
        """
        made_by = {value: e for e in self.program.flat() for value in e.outputs}

        def read(value: Value) -> jax.Array:
            if value in self._values:
                leaf = self.leaves[self._values[value]]
                shape = jnp.shape(arrays[leaf.path]) if leaf.path in arrays else None
                if shape != leaf.shape:
                    raise ValueError(
                        f"The scale of a bias depends on {leaf.name!r}, which has shape "
                        f"{leaf.shape} in the graph and {shape} in the params. Trace the model "
                        "with the params, and give all of them."
                    )
                return arrays[leaf.path]
            if value not in made_by:
                return jnp.asarray(value.constant)
            equation = made_by[value]
            outputs = equation.bind([read(x) for x in equation.inputs])
            result: jax.Array = outputs[equation.outputs.index(value)]
            return result

        return read

    def find_unproven(
        self, masked: Mapping[Path, Collection[tuple[int, Axis]]]
    ) -> dict[Axis, Reason]:
        """Returns the variables whose removal differs from masking, and why.

        Each variable is proven by itself: masked entries of one tell nothing of another.

        Args:
          masked: {path: (axis, variable) of all removed entries at which the parameter is 0}.
        """
        return self._prove(masked).refused

    @property
    def alike(self) -> dict[Equation, Alike]:
        """{sum along channels: the entry that removed channels share}, which a cut model adds."""
        return self._prove(self._maskable).alike

    def _prove(self, masked: Mapping[Path, Collection[tuple[int, Axis]]]) -> Proven:
        """Returns what a proof tells of channels whose entries are 0 where they are removed."""
        key = frozenset((path, *entry) for path, entries in masked.items() for entry in entries)
        if key not in self._proofs:
            paths = {value: self.leaves[i].path for value, i in self._values.items()}
            entries = {value: masked[path] for value, path in paths.items() if path in masked}
            proof = Proof(self.program, self.coupling, entries)
            self._proofs[key] = Proven(proof.refused, proof.alike)
        return self._proofs[key]

    @functools.cached_property
    def updated_state(self) -> set[Path]:
        """Paths of the parameters that a call replaces, so that no mask holds."""
        inputs, outputs = self.program.inputs, self.program.outputs
        pairs = self.carried.items()
        return {self.leaves[i].path for out, i in pairs if outputs[out] is not inputs[i]}

    @functools.cached_property
    def _maskable(self) -> dict[Path, set[tuple[int, Axis]]]:
        """Entries that masking all channels sets to 0, as `find_unproven` takes them."""
        return {
            leaf.path: {(axis, v) for axis, dim in enumerate(dims) for v in variables(dim)}
            for leaf, dims in self.list_axes()
            if leaf.path not in self.updated_state and jnp.issubdtype(leaf.dtype, jnp.inexact)
        }

    @functools.cached_property
    def _channels(self) -> tuple[list[ChannelGroup], list[Refusal]]:
        made: dict[Path, set[int]] = {}
        windows: dict[Path, set[int]] = {}
        for use in self.uses:
            if use.primitive in PRODUCTS:
                made.setdefault(use.path, set()).update(use.output)
                windows.setdefault(use.path, set()).update({*use.contracting} - {*use.channels})
        layers = layered(self.program, self.coupling)
        unproven = self.find_unproven(self._maskable)
        return find_channels(self.list_axes(), unproven, made, windows, layers)


def _density(uses: Sequence[Use], density: Mapping[Path, costs.Number]) -> costs.Number:
    """Returns the part of the entries of an operand that may differ from 0.

    Parameters that were joined add up. Parameters that were multiplied bound each other: a
    parameter with a density counts.
    """
    total: costs.Number = Fraction(0)
    free = Fraction(1)  # the part of the operand that no earlier parameter has
    for use in sorted(uses, key=lambda use: use.path not in density or not use.view.keeps_zeros):
        share = min(use.view.share, free)
        free -= share
        part = density.get(use.path, Fraction(1)) if use.view.keeps_zeros else Fraction(1)
        total = total + part * share
    return total + free if free else total
