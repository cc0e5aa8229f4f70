"""Proves that masked channels can be removed: the second pass.

Masking sets the parameters of a channel to 0. From these follow the constants of later arrays at
removed entries: 0 after a product, 1 after exp. Removing the channel gives the same result if every
operation that joins removed entries with others reads a neutral constant: 0 in a sum, -inf in a
maximum.

A sum may also read an entry that all removed channels share, which the smaller program adds. The
variance of LayerNorm sums squares of x - mean(x). Where channels are masked, x is 0 and a term is
the square of -mean(x): not a constant, but the same number in all masked channels. Where a constant
array of the program is added to x, such as sinusoids, each removed channel has a term of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from sparsity.core.trees import Path, PyTree
from sparsity.graph.coupling import STEPS, Coupling
from sparsity.graph.groups import Channels, find_channels
from sparsity.graph.kinds import find_kinds
from sparsity.graph.traced_model import Model, Parameter
from sparsity.graph.uses import Use
from sparsity.programs import entrywise
from sparsity.programs.axes import Axis, AxisIndex, Reason, Variable, list_variables
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS, SOURCES, is_same
from sparsity.programs.layout import LAYOUTS, AxisRule, Place
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import CALLS, CONTROL, Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Flow

_MAX_EQUATIONS = 64  # equations that a smaller program evaluates for one sum

# An axis, and the variable that loses entries.
RemovedEntry: TypeAlias = tuple[AxisIndex, Variable]


class Constants:
    """The constants that an array holds.

    Attributes:
      at: constants at removed entries, by place.
      everywhere: the constant that all entries are, `None` if they differ.
      may_be_nan: entries may be NaN in place of the constants, as where a lookup is out of range.
    """

    def __init__(
        self,
        at: Mapping[RemovedEntry, float | None] | None = None,
        everywhere: float | None = None,
        may_be_nan: bool = False,
    ):
        self.at = {entry: c for entry, c in (at or {}).items() if c is not None}
        self.everywhere, self.may_be_nan = everywhere, may_be_nan

    def __getitem__(self, entry: RemovedEntry) -> float | None:
        return self.at.get(entry, self.everywhere)

    def renumber_axes(self, renumber: Callable[[int], int | None]) -> Constants:
        """Returns the constants with other indices of axes, `None` for an axis that is gone."""
        renumbered = ((renumber(i), v, c) for (i, v), c in self.at.items())
        at = {(i, v): c for i, v, c in renumbered if i is not None}
        return Constants(at, self.everywhere, self.may_be_nan)

    def meet(self, other: Constants) -> Constants:
        """Returns the constants that both have."""
        # Either side may state an entry that the other has only by `everywhere`.
        at = {entry: c for entry, c in self.at.items() if is_same(other[entry], c)}
        at |= {entry: c for entry, c in other.at.items() if is_same(self[entry], c)}
        everywhere = self.everywhere if is_same(self.everywhere, other.everywhere) else None
        return Constants(at, everywhere, self.may_be_nan or other.may_be_nan)

    def with_nan(self) -> Constants:
        """Returns the constants of an array that may be NaN in their place."""
        return Constants(self.at, self.everywhere, may_be_nan=True)

    # A loop ends once its facts stay equal. Texts are compared because `nan == nan` is False. Facts
    # are values of dicts, never keys, and need no hash.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and repr(self._key()) == repr(other._key())

    def _key(self) -> tuple[object, ...]:
        at = sorted((i, id(v), c) for (i, v), c in self.at.items())
        return self.everywhere, self.may_be_nan, at


class SharedEntry(NamedTuple):
    """The entry of a value that all removed channels share.

    Without a constant and a maker, the entry is the value itself, which has no channels; or the
    value is a constant array, whose entries differ from channel to channel.

    Attributes:
      value: the value.
      constant: the entry if it is a constant.
      maker: the equation that computes the entry from entries of its inputs.
      inputs: these entries.
      differs: whether each channel has an entry of its own, which a constant array gives.
    """

    value: Value
    constant: float | None = None
    maker: Equation | None = None
    inputs: tuple[SharedEntry, ...] = ()
    differs: bool = False

    def list_values(self) -> list[Value]:
        """Returns the values of the program from which the entry is computed."""
        if self.constant is None and self.maker is None:
            return [self.value]
        return [value for entry in self.inputs for value in entry.list_values()]


class Readable(NamedTuple):
    """Values that one equation after another may read, as jax traces them.

    Attributes:
      makers: {value that is available: the equation that makes the value, if one does}.
      entries: {(value, variable): the entry of removed channels, `None` if unknown}.
    """

    makers: dict[Value, Equation | None]
    entries: dict[tuple[Value, Variable], SharedEntry | None]


def find_scopes(program: Program) -> dict[Equation, Readable]:
    """Returns the scope of each equation of a program, and of its calls.

    Only inputs and outputs enter and leave a call that is not inline: jax traces it by itself.
    """
    scopes: dict[Equation, Readable] = {}

    def enter(program: Program, scope: Readable) -> None:
        for equation in program.equations:
            scopes[equation] = scope
            if equation.is_inline:
                enter(equation.inner_programs[0], scope)
            elif equation.name in CALLS:
                inputs = equation.inner_programs[0].inputs
                enter(equation.inner_programs[0], Readable(dict.fromkeys(inputs), {}))
                scope.makers.update(dict.fromkeys(equation.outputs))
            else:
                scope.makers.update(dict.fromkeys(equation.outputs, equation))

    enter(program, Readable(dict.fromkeys(program.inputs), {}))
    return scopes


class Proof(Flow[Constants]):
    """Decides which variables can lose the entries that are masked.

    Args:
      program: the program.
      coupling: the axes of the program.
      masked: {input of the program: removed entries at which the input is 0}.

    Attributes:
      refused: variables that cannot lose entries, and why.
      shared_entries: {sum along channels: (axis, the entry that removed channels share)}, which a
        smaller program adds for each of them.
    """

    def __init__(
        self, program: Program, coupling: Coupling, masked: Mapping[Value, Collection[RemovedEntry]]
    ):
        super().__init__()
        self._coupling = coupling
        self._free: dict[Value, list[list[Variable]]] = {}
        self._scopes: dict[Equation, Readable] = {}
        self.refused: dict[Variable, Reason] = {}
        self.shared_entries: dict[Equation, tuple[AxisIndex, SharedEntry]] = {}
        for value, masked_entries in masked.items():
            entries = [entry for entry in self._list_free_entries(value) if entry in masked_entries]
            self.facts[value] = Constants(dict.fromkeys(entries, 0.0))
        self.run(program)

    def _list_free_variables(self, value: Value) -> list[list[Variable]]:
        """Returns for each axis the variables that may lose entries, by the first pass."""
        if value not in self._free:
            axes = map(list_variables, self._coupling.axes(value))
            self._free[value] = [[v for v in axis if v.pin is None and v.size > 1] for axis in axes]
        return self._free[value]

    def _list_free_entries(self, value: Value) -> list[RemovedEntry]:
        return [(i, v) for i, free in enumerate(self._list_free_variables(value)) for v in free]

    def initial_fact(self, value: Value) -> Constants:
        return Constants(everywhere=entrywise.find_uniform_value(value.constant))

    def run(self, program: Program) -> None:
        self._scopes |= find_scopes(program)
        super().run(program)
        for equation, rule in program.calls_with_rules():
            constants = [self.fact(value) for value in equation.inputs]
            # A rule has more inputs than its call: tangents or cotangents, which come last.
            self.facts.update(zip(rule.inputs, constants, strict=False))
            if equation.maps_tangents:  # constants have no tangents
                tangents = rule.inputs[len(constants) :]
                for value, tangent in zip(equation.differentiated[0], tangents, strict=True):
                    self.facts[tangent] = Constants(dict.fromkeys(self.fact(value).at, 0.0))
            self._scopes |= find_scopes(rule)
            super().run(rule)

    def enters(self, equation: Equation) -> bool:
        return equation.name in CONTROL

    def join(
        self, one: Constants, other: Constants, equation: Equation, target: Value
    ) -> Constants:
        return one.meet(other)

    def take_layer(self, fact: Constants, scan: Equation) -> Constants:
        return fact.renumber_axes(lambda i: i - 1 if i else None)

    def stack_layers(self, fact: Constants, scan: Equation) -> Constants:
        return fact.renumber_axes(lambda i: i + 1)

    def visit(self, equation: Equation) -> None:
        name = equation.name
        if name in ENTRYWISE:
            self._visit_entrywise(equation)
        elif name in REDUCTIONS:
            self._visit_reduction(equation)
        elif name in LAYOUTS:
            self._visit_layout(equation, LAYOUTS[name])
        elif name in PRODUCTS:
            self._visit_product(equation)
        # All other primitives make new entries, or are pinned.
        if any(self.fact(value).may_be_nan for value in equation.inputs):
            for output in equation.outputs:
                self.facts[output] = self.fact(output).with_nan()

    def _visit_entrywise(self, equation: Equation) -> None:
        inputs = [self.fact(value) for value in equation.inputs]
        if len(equation.outputs) > 1:
            self.facts.update(zip(equation.outputs, inputs, strict=True))
            return
        (output,) = equation.outputs
        # The constants do not tell the result of a comparison with NaN.
        if any(fact.may_be_nan for fact in inputs) and entrywise.may_remove_nan(equation):
            self.facts[output] = Constants()
            return
        at: dict[RemovedEntry, float | None] = {}
        fold = functools.cache(functools.partial(entrywise.fold_constant, equation))
        for entry in (entry for fact in inputs for entry in fact.at):
            at[entry] = fold(tuple(fact[entry] for fact in inputs))
        self.facts[output] = Constants(at, fold(tuple(fact.everywhere for fact in inputs)))

    def _visit_reduction(self, equation: Equation) -> None:
        (value,), axes, rule = equation.inputs, equation.params["axes"], REDUCTIONS[equation.name]
        constants = self.fact(value)
        neutral = None if rule.neutral is None else rule.neutral(value.dtype)
        for axis in axes:
            for variable in self._list_free_variables(value)[axis]:
                constant = constants[axis, variable]
                is_neutral = neutral is not None and constant == neutral
                if not is_neutral and variable not in self.refused:
                    if constant is None and self._note_shared_entry(equation, axis, variable):
                        continue
                    name = equation.name.removeprefix("reduce_")
                    text = f"{name} over the channels, where removed entries are "
                    text += f"{_show(constant)}, not {_show(neutral)}"
                    self.refused[variable] = Reason(equation, text)
        kept_axes = [i for i in range(len(value.shape)) if i not in axes]
        reduced = constants.renumber_axes(lambda i: kept_axes.index(i) if i in kept_axes else None)
        # A reduction of no entries has its neutral number as result, not the constants.
        is_empty = 0 in [value.shape[axis] for axis in axes]
        (output,), name = equation.outputs, equation.name
        self.facts[output] = Constants() if is_empty else _reduce(reduced, name)

    def _note_shared_entry(self, reduction: Equation, axis: AxisIndex, variable: Variable) -> bool:
        """Notes the entry that a smaller program adds to a sum; returns whether there is one."""
        (value,), scope = reduction.inputs, self._scopes[reduction]
        if reduction.name != "reduce_sum" or not is_differentiable(value):
            return False
        # All that the axis may lose must be one entry, of whichever variable.
        variables = [v for v in self._list_free_variables(value)[axis] if v not in self.refused]
        num_before = len(scope.entries)
        entries = [self._find_shared_entry(value, v, scope, num_before) for v in variables]
        entry, is_variable = entries[0], self._coupling.axes(value)[axis].root is variable
        if entry is None or entries.count(entry) < len(entries) or entry.differs > is_variable:
            return False
        return self.shared_entries.setdefault(reduction, (axis, entry)) == (axis, entry)

    def _find_axes(self, value: Value, variable: Variable) -> list[AxisIndex]:
        axes = self._coupling.axes(value)
        return [i for i, axis in enumerate(axes) if variable in list_variables(axis)]

    def _find_shared_entry(
        self, value: Value, variable: Variable, scope: Readable, num_before: int
    ) -> SharedEntry | None:
        """Returns the entry of a value that removed channels share, `None` if there is none.

        Args:
          value: the value.
          variable: the variable of the channels.
          scope: the values from which an entry may be computed.
          num_before: number of entries in the scope before those of this sum.
        """
        key = value, variable
        if key not in scope.entries:
            if len(scope.entries) > num_before + 2 * _MAX_EQUATIONS:
                return None
            scope.entries[key] = None  # which holds the place
            scope.entries[key] = self._derive_shared_entry(value, variable, scope, num_before)
        return scope.entries[key]

    def _derive_shared_entry(
        self, value: Value, variable: Variable, scope: Readable, num_before: int
    ) -> SharedEntry | None:
        constants, axes = self.fact(value), self._find_axes(value, variable)
        if len(axes) > 1:
            return None
        axis = axes[0] if axes else None
        constant = constants.everywhere if axis is None else constants[axis, variable]
        if constant is not None:
            return None if math.isnan(constant) else SharedEntry(value, constant)
        if value.constant is not None:
            return SharedEntry(value, differs=axis is not None)
        maker = scope.makers.get(value)
        if axis is None:
            return SharedEntry(value) if value in scope.makers else None
        if maker is None or not self._is_by_channel(maker, axis, variable):
            return None
        entries = [self._find_shared_entry(x, variable, scope, num_before) for x in maker.inputs]
        inputs = tuple(entry for entry in entries if entry is not None)
        # The sign of a 0 is not followed.
        reads_zero = entrywise.reads_zero_sign(maker) and [x.constant for x in inputs[1:]] == [0]
        if len(inputs) < len(maker.inputs) or reads_zero:
            return None
        differs = maker.name in SOURCES or any(entry.differs for entry in inputs)
        return SharedEntry(value, maker=maker, inputs=inputs, differs=differs)

    def _is_by_channel(self, maker: Equation, axis: AxisIndex, variable: Variable) -> bool:
        """Returns whether an equation computes each channel of its output from that of its inputs.

        Args:
          maker: the equation.
          axis: the axis of the output that has the channels.
          variable: the variable of the channels.
        """
        name, sources = maker.name, set[int]()
        if len(maker.outputs) > 1:
            return False
        if name in ENTRYWISE:
            may_be_nan = any(self.fact(x).may_be_nan for x in maker.inputs)
            return not (may_be_nan and entrywise.may_remove_nan(maker))
        if name in REDUCTIONS or name in SOURCES:
            return True
        if name in LAYOUTS:
            pairs = [x.pair for x in LAYOUTS[name].relate(maker) if x.pair]
            sources = {source.array for source, target in pairs if target.axis == axis}
        elif name in PRODUCTS and read_product(maker).kind == "dot":
            sources = {i for i in range(2) if axis in read_product(maker).map_result_axes(i)}
        return sources == {i for i, x in enumerate(maker.inputs) if self._find_axes(x, variable)}

    def _visit_layout(self, equation: Equation, rule: AxisRule) -> None:
        relations, reduction = rule.relate(equation), rule.find_reduction(equation)
        sources: dict[Place, list[Place]] = {}
        for relation in relations:
            for place in relation.targets if relation.may_lose_entries else ():
                if not isinstance(place, int):
                    axes = [x for x in relation.sources if not isinstance(x, int)]
                    sources.setdefault(place, []).extend(axes)
        for index, output in enumerate(equation.outputs):
            inputs = {i: equation.inputs[i] for i in rule.sources(equation, index)}
            at: dict[RemovedEntry, float | None] = {}
            for axis, variable in self._list_free_entries(output):
                axes = sources.get(Place(index, axis), [])
                at[axis, variable] = self._meet_inputs(inputs, axes, variable)
            everywhere = _find_common([self.fact(value).everywhere for value in inputs.values()])
            constants, fill = Constants(at, everywhere), rule.fill(equation)
            if reduction is not None:
                constants = _reduce(constants, reduction)
            if fill is not None and math.isnan(fill):
                constants = constants.with_nan()
            elif fill is not None:  # takes the place of entries that are out of range
                constants = constants.meet(Constants(everywhere=fill))
            self.facts[output] = constants

    def _meet_inputs(
        self, inputs: Mapping[int, Value], axes: Sequence[Place], variable: Variable
    ) -> float | None:
        """Returns the constant of all inputs at removed entries of a variable, if there is one."""
        constants = [
            self.fact(inputs[index])[axis, variable]
            for index, axis in axes
            if index in inputs and variable in self._list_free_variables(inputs[index])[axis]
        ]
        # A scalar, such as a padding value, lies at the places of all variables, too.
        constants += [self.fact(value).everywhere for value in inputs.values() if not value.shape]
        if any(x is not None and x != x for x in constants):
            return math.nan
        return _find_common(constants)

    def _visit_product(self, equation: Equation) -> None:
        product, values = read_product(equation), equation.inputs

        def find_factors(
            operand: int, axis: AxisIndex, variable: Variable
        ) -> tuple[float | None, float | None]:
            """Returns the constants of removed entries and of the entries that they meet."""
            constants = [self.fact(values[index]) for index in (operand, 1 - operand)]
            partner = product.map_paired_axes(operand).get(axis)
            other = None if partner is None else constants[1][partner, variable]
            return constants[0][axis, variable], other

        for axis in product.rhs.inputs:
            for variable in self._list_free_variables(values[1])[axis]:
                one, other = find_factors(1, axis, variable)
                if entrywise.multiply_constants(one, other) != 0:
                    text = f"a product along the channels of {_show(other)} and {_show(one)}"
                    self.refused.setdefault(variable, Reason(equation, f"{text} where removed"))
        (result,) = equation.outputs
        at = {
            (place, variable): entrywise.sum_constant_products(
                *find_factors(operand, axis, variable)
            )
            for operand in range(2)
            for place, axis in product.map_result_axes(operand).items()
            for variable in self._list_free_variables(result)[place]
        }
        self.facts[result] = Constants(at)


def _reduce(constants: Constants, name: str) -> Constants:
    """Returns the constants of a reduction along entries that are equal."""
    return Constants(
        {entry: entrywise.repeat_constant(name, c) for entry, c in constants.at.items()}
    )


def _find_common(constants: Sequence[float | None]) -> float | None:
    """Returns the constant that all are, `None` if they differ or one is NaN."""
    return constants[0] if constants and all(x == constants[0] for x in constants) else None


def _show(constant: float | None) -> str:
    return "not known" if constant is None else f"{constant:g}"


class Removal:
    """Channels that can be removed from a model; computed when first asked for.

    Args:
      model: the model.
      products: the dots and convolutions that read parameters.
    """

    def __init__(self, model: Model, products: Sequence[Use]) -> None:
        self._model, self._products = model, products
        self._proofs: dict[frozenset[tuple[object, ...]], PyTree] = {}

    def list_members(self) -> set[tuple[Path, AxisIndex]]:
        """Returns (path, axis) of all axes of parameters that can lose channels."""
        return {member for group in self.channels.groups for member in group.members}

    def list_parameter_axes(self) -> list[tuple[Parameter, list[Axis]]]:
        """Returns the parameters with their axes."""
        return [(x, self.coupling.axes(value)) for value, x in self._model.parameter_inputs.items()]

    def list_stacked(self, layers: Variable) -> list[Path]:
        """Returns the parameters whose first axis is that of the layers of a scan."""
        return [x.path for x, axes in self.list_parameter_axes() if axes and axes[0].root is layers]

    @functools.cached_property
    def coupling(self) -> Coupling:
        """The axes of all values of the program."""
        return Coupling(self._model)

    def find_unproven(
        self, masked: Mapping[Path, Collection[tuple[AxisIndex, Variable]]]
    ) -> dict[Variable, Reason]:
        """Returns the variables whose removal differs from masking, and why.

        Each variable is proven by itself: its masked entries prove nothing about another variable.

        Args:
          masked: {path: (axis, variable) of all removed entries at which the parameter is 0}.
        """
        return self._prove(masked)[0]

    @property
    def unproven(self) -> dict[Variable, Reason]:
        """The variables whose removal differs from masking all of their entries, and why."""
        return self.find_unproven(self._maskable_entries)

    @property
    def shared_entries(self) -> dict[Equation, tuple[AxisIndex, SharedEntry]]:
        """{sum: (axis, the entry that removed channels share along it)}, which a cut model adds."""
        return self._prove(self._maskable_entries)[1]

    def _prove(
        self, masked: Mapping[Path, Collection[tuple[AxisIndex, Variable]]]
    ) -> tuple[dict[Variable, Reason], dict[Equation, tuple[AxisIndex, SharedEntry]]]:
        """Returns `refused` and `shared_entries` of a proof; removed entries are 0."""
        key = frozenset((path, *entry) for path, entries in masked.items() for entry in entries)
        if key not in self._proofs:
            values = self._model.parameter_inputs.items()
            entries = {value: masked[x.path] for value, x in values if x.path in masked}
            proof = Proof(self._model.program, self.coupling, entries)
            # Without the facts from which they follow.
            self._proofs[key] = proof.refused, proof.shared_entries
        return self._proofs[key]

    @functools.cached_property
    def updated_state(self) -> set[Path]:
        """Paths of the parameters that a call replaces, so that masks do not keep zeros there."""
        program, parameters = self._model.program, self._model.parameters
        pairs = self._model.carried.items()
        return {parameters[i].path for n, i in pairs if program.outputs[n] is not program.inputs[i]}

    @functools.cached_property
    def may_be_empty(self) -> set[Variable]:
        """Variables of groups of which all channels may go."""
        return {group.variable for group in self.channels.groups} - self.never_empty

    @functools.cached_property
    def never_empty(self) -> set[Variable]:
        """Variables of which an entry must stay: sums and maxima run over them, or groups are."""
        axes: list[Axis] = [*self.coupling.feature_groups.values()]
        for program in self._model.program.nested_programs():
            for equation in program.flat_equations():
                if equation.name in REDUCTIONS:
                    values = [self.coupling.axes(value) for value in equation.inputs]
                    axes += [x[i] for x in values if x for i in equation.params["axes"]]
        return {variable for axis in axes for variable in list_variables(axis)}

    @functools.cached_property
    def _maskable_entries(self) -> dict[Path, set[tuple[AxisIndex, Variable]]]:
        """Entries that masking all channels sets to 0, as `find_unproven` takes them."""
        return {
            parameter.path: {(i, v) for i, axis in enumerate(axes) for v in list_variables(axis)}
            for parameter, axes in self.list_parameter_axes()
            if parameter.path not in self.updated_state
            and jnp.issubdtype(parameter.dtype, jnp.inexact)
        }

    @functools.cached_property
    def channels(self) -> Channels:
        """The channels that can be removed, and the axes that have none."""
        output_axes: dict[Path, set[AxisIndex]] = {}
        window_axes: dict[Path, set[AxisIndex]] = {}
        for use in self._products:
            output_axes.setdefault(use.path, set()).update(use.output)
            window = {*use.contracting} - {*use.channels}
            window_axes.setdefault(use.path, set()).update(window)
        steps = {
            variable: Reason(scan, STEPS)
            for scan, axis in self.coupling.step_axes.items()
            for variable in list_variables(axis)
        }
        unproven = self.unproven | steps
        num_layers = _find_layered_variables(self._model.program, self.coupling)
        kinds = find_kinds(self._model.program, self.coupling, self._products)
        return find_channels(
            self.list_parameter_axes(), unproven, output_axes, window_axes, num_layers, kinds
        )


def _find_layered_variables(program: Program, coupling: Coupling) -> dict[Variable, int]:
    """Returns {variable: number of layers} where layers of a scan may keep different entries.

    A scan runs one program on layer after layer of stacked arrays. Channels that live within a
    layer, as hidden units do, may differ between layers; channels of the carry may not.
    """
    layers: dict[Variable, int] = {}
    for scan in (equation for equation in program.flat_equations() if equation.name == "scan"):
        (body,) = scan.list_bodies()
        for value in (scan.inputs[index] for index in body.layers):
            steps, *axes = coupling.axes(value)
            for variable in (v for axis in axes for v in list_variables(axis)):
                is_free = variable.pin is None and variable not in layers
                if is_free and _is_within_layers(program, coupling, variable, steps.root):
                    layers[variable] = scan.length
    return layers


def _is_within_layers(
    program: Program, coupling: Coupling, variable: Variable, steps: Axis
) -> bool:
    """Returns whether all arrays with a variable are stacks of layers, or lie within the layers.

    Args:
      program: the program, or a body.
      coupling: the axes of the program.
      variable: the variable.
      steps: the axis of the layers.
    """

    def has_variable(value: Value) -> bool:
        return any(variable in list_variables(axis) for axis in coupling.axes(value))

    def is_stack(value: Value) -> bool:
        first_axis, *_ = coupling.axes(value)
        return first_axis.root is steps and variable not in list_variables(first_axis)

    values = {*program.inputs, *program.outputs}
    for equation in program.flat_equations():
        values.update(equation.inputs, equation.outputs)
    calls = (value for equation, _ in program.calls_with_rules() for value in equation.inputs)
    if not all(map(is_stack, filter(has_variable, values))) or any(map(has_variable, calls)):
        return False
    for equation in program.flat_equations():
        if equation.name == "scan":
            (body,) = equation.list_bodies()
            if not any(map(has_variable, body.program.inputs[: body.layers.start])):
                continue  # each step reads a layer of the stacks
        inner = equation.inner_programs
        if not all(_is_within_layers(body, coupling, variable, steps) for body in inner):
            return False
    return True
