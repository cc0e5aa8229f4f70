"""Proves that masked channels can be removed: the second pass.

Masking sets the parameters of a channel to 0. From these follow the constants of later arrays at
removed entries: 0 after a product, 1 after `exp`. Removing the channel gives the same result if
every operation that joins removed entries with others reads a neutral constant: 0 in a sum, -inf in
a maximum. A sum may also read an entry that all removed channels share, which the smaller program
adds: see `shared_entries`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence

from sparsity.graph.channels.coupling import Coupling
from sparsity.graph.removal.constants import Constants, RemovedEntry
from sparsity.graph.removal.shared_entries import (
    AvailableValues,
    SharedEntry,
    find_available_values,
    find_shared_entry,
)
from sparsity.programs import entrywise
from sparsity.programs.axes import AxisIndex, Reason, Variable, list_variables
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS
from sparsity.programs.layout import LAYOUTS, AxisRule, Place
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import CONTROL, Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Flow


class Proof(Flow[Constants]):
    """Decides which variables can lose the entries that are masked.

    Args:
      program: the program.
      coupling: the axes of the program.
      masked: {input of the program: removed entries at which the input is 0}.

    Attributes:
      refused: variables that cannot lose entries, and why.
      shared_entries: {sum along channels: the entry that removed channels share}, which a smaller
        program adds for each of them.
    """

    def __init__(
        self, program: Program, coupling: Coupling, masked: Mapping[Value, Collection[RemovedEntry]]
    ):
        super().__init__()
        self._coupling = coupling
        self._free: dict[Value, list[list[Variable]]] = {}
        self._available: dict[Equation, AvailableValues] = {}
        self.refused: dict[Variable, Reason] = {}
        self.shared_entries: dict[Equation, SharedEntry] = {}
        for value, masked_entries in masked.items():
            entries = [entry for entry in self._list_free_entries(value) if entry in masked_entries]
            self.facts[value] = Constants(dict.fromkeys(entries, 0.0))
        self.run(program)

    def _list_free_variables(self, value: Value) -> list[list[Variable]]:
        """Returns for each axis the variables that the first pass did not pin."""
        if value not in self._free:
            axes = map(list_variables, self._coupling.axes(value))
            self._free[value] = [[v for v in axis if v.pin is None] for axis in axes]
        return self._free[value]

    def _list_free_entries(self, value: Value) -> list[RemovedEntry]:
        return [(i, v) for i, free in enumerate(self._list_free_variables(value)) for v in free]

    def initial_fact(self, value: Value) -> Constants:
        return Constants(everywhere=entrywise.find_uniform_value(value.constant))

    def run(self, program: Program) -> None:
        self._available |= find_available_values(program)
        super().run(program)
        for equation, rule in program.calls_with_rules():
            constants = [self.fact(value) for value in equation.inputs]
            # A rule has more inputs than its call: tangents or cotangents, which come last.
            self.facts.update(zip(rule.inputs, constants, strict=False))
            if equation.maps_tangents:  # constants have no tangents
                tangents = rule.inputs[len(constants) :]
                for value, tangent in zip(equation.differentiated[0], tangents, strict=True):
                    self.facts[tangent] = Constants(dict.fromkeys(self.fact(value).at, 0.0))
            self._available |= find_available_values(rule)
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
        (value,) = reduction.inputs
        axes = self._coupling.axes(value)
        # A removed channel must be one entry along the axis of the sum, and lie on no other axis.
        is_single = [variable in list_variables(other) for other in axes].count(True) == 1
        is_sum = reduction.name == "reduce_sum" and is_differentiable(value)
        if not is_sum or axes[axis].root is not variable or not is_single:
            return False
        available = self._available[reduction]
        entry = find_shared_entry(value, axis, variable, available, self.fact)
        if entry is None or self.shared_entries.get(reduction, entry).axis != axis:
            return False
        self.shared_entries[reduction] = entry
        return True

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
