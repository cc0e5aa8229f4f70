"""Couples the axes of a program that lose entries together.

The first of two passes: every equation unifies the axes along which it runs in step, and pins axes
that it needs in full. An unknown primitive pins all axes of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sparsity.graph.traced_model import Model
from sparsity.programs.axes import Axis, Join, Reason, join_axes, list_variables, pin, unify
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS, SOURCES
from sparsity.programs.layout import LAYOUTS, AxisRule, Place, Relation
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import CONTROL, Equation, Program, Value, find_read_values
from sparsity.programs.walk import Flow

STEPS = "the layers, or steps, of a scan"


class Coupling(Flow[list[Axis]]):
    """The axes of every value of a model's program.

    Args:
      model: the model; parameters may lose entries, other inputs may not.

    Attributes:
      feature_groups: the axis of the feature groups of each grouped convolution.
      step_axes: the axis of the layers, or steps, of each scan.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        program, carried = model.program, model.carried
        self.feature_groups: dict[Equation, Axis] = {}
        self.step_axes: dict[Equation, Axis] = {}
        for value in program.inputs:
            if value not in model.parameter_inputs:
                self.pin(value, Reason(None, "an input of the model", "input"))
        self.run(program)
        for index, value in enumerate(program.outputs):
            if index in carried:
                reason = Reason(None, "a state that is carried to the next call", "state")
                self._unify_axes(value, program.inputs[carried[index]], reason)
            else:
                self.pin(value, Reason(None, "an output of the model", "output"))
        replaced = {program.inputs[i] for i in carried.values()}
        for value in model.parameter_inputs.keys() - find_read_values(program) - replaced:
            self.pin(value, Reason(None, "no operation reads it", "unread"))

    def axes(self, value: Value) -> list[Axis]:
        """Returns the axes of a value."""
        return self.fact(value)

    def pin(self, value: Value, reason: Reason) -> None:
        """Pins all axes of a value, for a reason."""
        for axis in self.axes(value):
            pin(axis, reason)

    def initial_fact(self, value: Value) -> list[Axis]:
        return [Axis(size) for size in value.shape]

    def run(self, program: Program) -> None:
        super().run(program)
        for equation, rule in program.calls_with_rules():
            self._couple_rule(equation, rule)

    def enters(self, equation: Equation) -> bool:
        # Not shard_map: entries that share a device must stay together.
        return equation.name in CONTROL

    def join(
        self, one: list[Axis], other: list[Axis], equation: Equation, target: Value
    ) -> list[Axis]:
        text = "the result of a branch" if equation.is_choice else "a carry"
        reason = Reason(equation, text)
        for a, b in zip(other, one, strict=True):
            unify(a, b, reason)
        return one

    def take_layer(self, fact: list[Axis], scan: Equation) -> list[Axis]:
        steps, *axes = fact
        unify(steps, self.find_step_axis(scan), Reason(scan, STEPS))
        return axes

    def stack_layers(self, fact: list[Axis], scan: Equation) -> list[Axis]:
        return [self.find_step_axis(scan), *fact]

    def find_step_axis(self, scan: Equation) -> Axis:
        """Returns the axis of the layers, or steps, of a scan."""
        return self.step_axes.setdefault(scan, Axis(scan.length))

    def visit(self, equation: Equation) -> None:
        name = equation.name
        if name in ENTRYWISE:
            self._visit_entrywise(equation)
        elif name in REDUCTIONS:
            axes = self.axes(equation.inputs[0])
            kept_axes = [axis for i, axis in enumerate(axes) if i not in equation.params["axes"]]
            self.facts.update(dict.fromkeys(equation.outputs, kept_axes))
        elif name in SOURCES:
            for value in equation.inputs:
                self.pin(value, Reason(equation, "a random key, or a seed"))
        elif name in LAYOUTS:
            self._visit_layout(equation, LAYOUTS[name])
        elif name in PRODUCTS:
            self._visit_product(equation)
        else:
            self._pin_all(equation, "an operation that is not analysed")

    def _pin_all(self, equation: Equation, text: str) -> None:
        for value in (*equation.inputs, *equation.outputs):
            self.pin(value, Reason(equation, text))

    def _unify_axes(self, one: Value, other: Value, reason: Reason) -> None:
        for a, b in zip(self.axes(one), self.axes(other), strict=True):
            unify(a, b, reason)

    def _couple_rule(self, equation: Equation, rule: Program) -> None:
        """Couples the axes of a rule for derivatives: tangents have the axes of their values."""
        inputs, outputs = equation.differentiated
        tangents, derivatives = outputs, inputs
        if equation.maps_tangents:
            tangents, derivatives = inputs, [*outputs, *outputs]
        for value, inner in zip([*equation.inputs, *tangents], rule.inputs, strict=True):
            self.facts[inner] = self.axes(value)
        super().run(rule)
        for value, inner in zip(derivatives, rule.outputs, strict=True):
            self._unify_axes(value, inner, Reason(equation, "a rule for derivatives"))

    def _visit_entrywise(self, equation: Equation) -> None:
        reason = Reason(equation, "an operation along axes that do not match")
        if len(equation.outputs) > 1:  # each output is that of one input
            for value, output in zip(equation.inputs, equation.outputs, strict=True):
                self._unify_axes(value, output, reason)
            return
        (output,) = equation.outputs
        for value in equation.inputs:
            if len(value.shape) == len(output.shape):
                self._unify_axes(value, output, reason)
            elif value.shape or equation.name == "bitcast_convert_type":
                self.pin(value, reason)
                self.pin(output, reason)

    def _visit_layout(self, equation: Equation, rule: AxisRule) -> None:
        inputs = [self.axes(value) for value in equation.inputs]
        outputs: dict[Place, Axis] = {}

        def find_target(place: Place | int) -> Axis:
            if isinstance(place, int):
                return Axis(place)
            size = equation.outputs[place.array].shape[place.axis]
            return outputs.setdefault(place, Axis(size))

        for relation in rule.relate(equation):
            reason = Reason(equation, relation.text, "space" if rule.moves_window else "")
            # Entries of a constant may go, repetitions may not.
            number_pin = reason if relation.kind == "product" else None
            sources = [
                Axis(x, pin=number_pin) if isinstance(x, int) else inputs[x.array][x.axis]
                for x in relation.sources
            ]
            if relation.pair and relation.pair[1] not in outputs:
                outputs[relation.pair[1]] = sources[0]
            else:
                _relate(
                    relation, sources, [find_target(place) for place in relation.targets], reason
                )
        for index, output in enumerate(equation.outputs):
            self.facts[output] = [find_target(Place(index, i)) for i in range(len(output.shape))]

    def _visit_product(self, equation: Equation) -> None:
        product, (result,) = read_product(equation), equation.outputs
        if product.refusal is not None:
            self._pin_all(equation, product.refusal)
            return
        reason = Reason(equation, product.text)
        values = (*equation.inputs[:2], result)
        lhs, rhs = (self.axes(value) for value in values[:2])
        group: list[Axis] = []
        if product.groups > 1:
            # Inputs are groups x inputs of a group, outputs are groups x outputs of a group.
            group = [self.feature_groups.setdefault(equation, Axis(product.groups))]
            (output_axis,) = product.rhs.free
            within_group = Axis(rhs[output_axis].size // product.groups)
            unify(rhs[output_axis], join_axes("product", [*group, within_group]), reason)
        for i, j in product.pairs:
            unify(lhs[i], join_axes("product", [*group, rhs[j]]) if group else rhs[j], reason)
        for axis, source in enumerate(product.output):
            if source is not None:
                self.axes(result)[axis] = (lhs, rhs)[source[0]][source[1]]
        reason = reason._replace(
            text=product.ordered_text, kind="space" if product.rhs.window else ""
        )
        for index, axis in product.ordered:
            pin(self.axes(values[index])[axis], reason)
        for value in equation.inputs[2:]:
            self.pin(value, Reason(equation, product.ordered_text))


def _relate(
    relation: Relation, sources: Sequence[Axis], targets: Sequence[Axis], reason: Reason
) -> None:
    """Unifies the sources and the targets of a relation, or pins both."""
    if not relation.may_lose_entries:
        for axis in (*sources, *targets):
            pin(axis, reason)
        return
    if relation.kind == "sum":
        sources = [_drop_pinned_parts(axis) for axis in sources]
    join: Join = "product" if relation.kind == "product" else "sum"
    one, other = (x[0] if len(x) == 1 else join_axes(join, x) for x in (targets, sources))
    unify(one, other, reason)


def _drop_pinned_parts(axis: Axis) -> Axis:
    """Returns an axis, or one without parts in its place if no entry of the axis can go."""
    pins = [variable.pin for variable in list_variables(axis)]
    return Axis(axis.size, pin=pins[0]) if pins and all(pins) else axis


ANALYSED_PRIMITIVES: tuple[Collection[str], ...] = (
    ENTRYWISE,
    REDUCTIONS,
    SOURCES,
    LAYOUTS,
    PRODUCTS,
)
