"""Which axes of a program lose entries together.

The first of two passes: every equation makes one (`unify`) the axes along which it runs in step,
and pins those of which it needs all entries. What a primitive does that is not listed here is not
known, so it pins all that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from sparsity.programs.axes import Axis, Reason, pin, product, total, unify, variables
from sparsity.programs.primitives import ELEMENTWISE, REDUCTIONS, SOURCES
from sparsity.programs.products import read_product
from sparsity.programs.program import Equation, Program, Value

# Along some of their axes they mix entries, along others they run entry by entry.
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
_WINDOWS = ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")


class Coupling:
    """The axes of every value of a program.

    Args:
      program: the program.
      free: its inputs that may lose entries; others are inputs of the model.
      carried: outputs, by number, that become the inputs of these numbers in the next call.
    """

    def __init__(self, program: Program, free: Collection[Value], carried: Mapping[int, int]):
        self._dims: dict[Value, list[Axis]] = {}
        self.groups_of: dict[Equation, Axis] = {}  # feature groups of convolutions
        for value in program.inputs:
            if value not in free:
                self.pin(value, Reason(None, "an input of the model"))
        self._run(program)
        for number, value in enumerate(program.outputs):
            if number in carried:
                reason = Reason(None, "a state that is carried to the next call")
                self._same(value, program.inputs[carried[number]], reason)
            else:
                self.pin(value, Reason(None, "an output of the model"))

    def axes(self, value: Value) -> list[Axis]:
        """The axes of a value."""
        if value not in self._dims:
            self._dims[value] = [Axis(size) for size in value.shape]
        return self._dims[value]

    def pin(self, value: Value, reason: Reason) -> None:
        """Says why no axis of a value can lose entries."""
        for dim in self.axes(value):
            pin(dim, reason)

    def _same(self, one: Value, other: Value, reason: Reason) -> None:
        for a, b in zip(self.axes(one), self.axes(other), strict=True):
            unify(a, b, reason)

    def _run(self, program: Program, with_rules: bool = True) -> None:
        for equation in program.flat():
            name = equation.name
            if name in ELEMENTWISE:
                self._elementwise(equation)
            elif name in REDUCTIONS:
                axes = equation.params["axes"]
                kept = [d for i, d in enumerate(self.axes(equation.inputs[0])) if i not in axes]
                for output in equation.outputs:
                    self._dims[output] = kept
            elif name in SOURCES:
                for value in equation.inputs:
                    self.pin(value, Reason(equation, "a random key, or a seed"))
            elif name in _RULES:
                _RULES[name](self, equation)
            else:
                for value in (*equation.inputs, *equation.outputs):
                    self.pin(value, Reason(equation, "an operation that is not analysed"))
        for equation in program.with_rules() if with_rules else ():
            self._derivative(equation)

    def _derivative(self, equation: Equation) -> None:
        """What a rule for derivatives couples: tangents have the axes of their values."""
        rule = equation.derivative
        assert rule is not None  # it has one
        of_inputs, of_outputs = equation.differentiated
        if equation.name == "custom_jvp_call":
            given, computed = of_inputs, [*of_outputs, *of_outputs]
        else:
            given, computed = of_outputs, of_inputs
        for value, inner in zip([*equation.inputs, *given], rule.inputs, strict=True):
            self._dims[inner] = self.axes(value)
        self._run(rule, with_rules=False)
        for value, inner in zip(computed, rule.outputs, strict=True):
            self._same(value, inner, Reason(equation, "a rule for derivatives"))

    def _elementwise(self, equation: Equation) -> None:
        reason = Reason(equation, "an operation along axes that do not match")
        if len(equation.outputs) > 1:  # each output is that of one input
            for value, output in zip(equation.inputs, equation.outputs, strict=True):
                self._same(value, output, reason)
            return
        (output,) = equation.outputs
        for value in equation.inputs:
            if len(value.shape) == len(output.shape):
                self._same(value, output, reason)
            elif value.shape or equation.name == "bitcast_convert_type":
                self.pin(value, reason)
                self.pin(output, reason)

    def _transpose(self, equation: Equation) -> None:
        dims = self.axes(equation.inputs[0])
        self._dims[equation.outputs[0]] = [dims[i] for i in equation.params["permutation"]]

    def _squeeze(self, equation: Equation) -> None:
        dims = self.axes(equation.inputs[0])
        gone = equation.params["dimensions"]
        self._dims[equation.outputs[0]] = [d for i, d in enumerate(dims) if i not in gone]

    def _broadcast(self, equation: Equation) -> None:
        reason = Reason(equation, "a broadcast")
        dims = self.axes(equation.outputs[0])
        axes = equation.params["broadcast_dimensions"]
        for dim, axis in zip(self.axes(equation.inputs[0]), axes, strict=True):
            unify(dim, dims[axis], reason)

    def _reshape(self, equation: Equation) -> None:
        reason = Reason(equation, "a reshape that takes channels apart")
        if not equation.inputs[0].size or equation.params["dimensions"] is not None:
            for value in (equation.inputs[0], equation.outputs[0]):
                self.pin(value, reason)
            return
        ones, others = (
            [dim for dim in self.axes(value) if dim.root.size != 1]
            for value in (equation.inputs[0], equation.outputs[0])
        )
        while ones and others:  # the shortest runs of axes with the same number of entries
            a, b = [ones.pop(0)], [others.pop(0)]
            while (left := _entries(a)) != (right := _entries(b)):
                shorter, rest = (a, ones) if left < right else (b, others)
                shorter.append(rest.pop(0))
            unify(product(b), product(a), reason)

    def _concatenate(self, equation: Equation) -> None:
        reason = Reason(equation, "a concatenation")
        axis, (output,) = equation.params["dimension"], equation.outputs
        self._join(axis, output, equation.inputs, reason)

    def _stack(self, equation: Equation) -> None:
        reason = Reason(equation, "a stack")
        one, several = equation.outputs, equation.inputs
        if equation.name == "unstack":
            one, several = several, one
        dims = list(self.axes(one[0]))
        pin(dims.pop(equation.params["axis"]), reason)
        for value in several:
            for dim, other in zip(self.axes(value), dims, strict=True):
                unify(dim, other, reason)

    def _tile(self, equation: Equation) -> None:
        reason = Reason(equation, "a repetition")
        (value,), (output,) = equation.inputs, equation.outputs
        times = equation.params["reps"]
        for dim, other, n in zip(self.axes(value), self.axes(output), times, strict=True):
            unify(other, product([Axis(n, pin=reason), dim]), reason)

    def _split(self, equation: Equation) -> None:
        reason = Reason(equation, "a split")
        self._join(equation.params["axis"], equation.inputs[0], equation.outputs, reason)

    def _join(self, axis: int, whole: Value, parts: list[Value], reason: Reason) -> None:
        """The parts lie one after the other along an axis of the whole."""
        dims = self.axes(whole)
        for part in parts:
            for i, dim in enumerate(self.axes(part)):
                if i != axis:
                    unify(dim, dims[i], reason)
        unify(dims[axis], total(self.axes(part)[axis] for part in parts), reason)

    def _slice(self, equation: Equation) -> None:
        params, (value,), (output,) = equation.params, equation.inputs, equation.outputs
        strides = params["strides"] or (1,) * len(value.shape)
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        for dim, cut, (start, end, stride) in zip(
            self.axes(value), self.axes(output), bounds, strict=True
        ):
            size = dim.root.size
            pinned = next(iter(variables(dim))).pin if size else None
            if (start, end, stride) == (0, size, 1):
                unify(dim, cut, Reason(equation, "a slice"))
            elif stride != 1:
                pin(dim, Reason(equation, "a slice with a stride"))
                pin(cut, Reason(equation, "a slice with a stride"))
            elif pinned and all(x.pin for x in variables(dim)):
                pin(cut, pinned)
            else:
                unify(dim, total([Axis(start), cut, Axis(size - end)]), Reason(equation, "a slice"))

    def _mixed(self, equation: Equation) -> None:
        """Entry by entry along the axes that it does not work along."""
        reason = Reason(equation, "an operation that needs all entries of the axis, in order")
        works = _works_along(equation)
        first = equation.inputs[0]
        for value in (*equation.inputs[1:], *equation.outputs):
            if len(value.shape) != len(first.shape):
                continue  # a start index, or the value that pads
            for i, (dim, other) in enumerate(zip(self.axes(first), self.axes(value), strict=True)):
                if not works(i) and dim.root.size == other.root.size:
                    unify(dim, other, reason)
                else:
                    pin(dim, reason)
                    pin(other, reason)

    def _dynamic_update_slice(self, equation: Equation) -> None:
        self._same(equation.inputs[0], equation.outputs[0], Reason(equation, "an update"))
        reason = Reason(equation, "an update at a place that is computed")
        for dim, other in zip(*map(self.axes, equation.inputs[:2]), strict=True):
            if dim.root.size == other.root.size:
                unify(dim, other, reason)
            else:
                pin(dim, reason)
                pin(other, reason)

    def _dot(self, equation: Equation) -> None:
        reason = Reason(equation, "a product")
        roles = read_product(equation)
        left, right = roles.operands
        dims = [self.axes(value) for value in equation.inputs]
        for i, j in zip(
            (*left.contracted, *left.batch), (*right.contracted, *right.batch), strict=True
        ):
            unify(dims[0][i], dims[1][j], reason)
        (result,) = equation.outputs
        for place, source in enumerate(roles.output):
            if source is not None:
                self.axes(result)[place] = dims[source[0]][source[1]]

    def _ragged_dot(self, equation: Equation) -> None:
        """A dot whose rows lie in order of the experts that multiply them."""
        self._dot(equation)
        reason = Reason(equation, "rows in the order of their experts")
        (rows, experts, sizes), (result,) = equation.inputs[:3], equation.outputs
        roles = read_product(equation)
        ragged = equation.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        made = [i for i, source in enumerate(roles.output) if source is None]
        axes = [(rows, ragged), (experts, roles.right.experts), (result, made)]
        for value, places in axes:
            for axis in places:
                pin(self.axes(value)[axis], reason)
        self.pin(sizes, reason)

    def _convolution(self, equation: Equation) -> None:
        reason = Reason(equation, "a convolution")
        (image, kernel), (output,) = equation.inputs, equation.outputs
        roles = read_product(equation)
        left, right, groups = roles.left, roles.right, roles.groups
        if equation.params["batch_group_count"] != 1:
            for value in (image, kernel, output):
                self.pin(value, Reason(equation, "a convolution in groups of the batch"))
            return
        x, w, y = self.axes(image), self.axes(kernel), self.axes(output)
        (features, *space), (ins, *window) = left.contracted, right.contracted
        (batch,), (outs,) = left.free, right.free
        unify(x[batch], y[roles.output.index((0, batch))], reason)
        if groups == 1:
            unify(x[features], w[ins], reason)
        else:
            group = self.groups_of[equation] = Axis(groups)
            unify(x[features], product([group, w[ins]]), reason)
            unify(w[outs], product([group, Axis(w[outs].root.size // groups)]), reason)
        unify(w[outs], y[roles.output.index((1, outs))], reason)
        spatial = Reason(equation, "an axis of space")
        made = [dim for dim, source in zip(y, roles.output, strict=True) if source is None]
        for dim in (*(x[i] for i in space), *(w[i] for i in window), *made):
            pin(dim, spatial)

    def _gather(self, equation: Equation) -> None:
        spec, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        looked_up = Reason(equation, "an axis in which entries are looked up")
        (operand, indices), (output,) = equation.inputs, equation.outputs
        source, target, places = self.axes(operand), self.axes(output), self.axes(indices)
        gone = {*spec.collapsed_slice_dims, *spec.operand_batching_dims}
        for axis in gone:
            pin(source[axis], looked_up)
        whole = [axis for axis in range(len(source)) if axis not in gone]
        for axis, to in zip(whole, spec.offset_dims, strict=True):
            if sizes[axis] == source[axis].root.size and axis not in spec.start_index_map:
                unify(source[axis], target[to], looked_up)
            else:
                pin(source[axis], looked_up)
                pin(target[to], looked_up)
        for dim in (*places, *(d for i, d in enumerate(target) if i not in spec.offset_dims)):
            pin(dim, Reason(equation, "an axis of indices"))

    def _scan(self, equation: Equation) -> None:
        fixed, carried = equation.params["num_consts"], equation.params["num_carry"]
        (body,) = equation.bodies
        stacked = Reason(equation, "the layers, or steps, of a scan")
        steps = Axis(equation.params["length"], pin=stacked)
        for number, (value, inner) in enumerate(zip(equation.inputs, body.inputs, strict=True)):
            dims = self.axes(value)
            if number >= fixed + carried:
                pin(dims[0], stacked)
                unify(dims[0], steps, stacked)
                dims = dims[1:]
            self._dims[inner] = dims
        self._run(body)
        for number, (value, inner) in enumerate(zip(equation.outputs, body.outputs, strict=True)):
            if number < carried:
                self._same(inner, body.inputs[fixed + number], Reason(equation, "a carry"))
                self._dims[value] = self.axes(inner)
            else:
                self._dims[value] = [steps, *self.axes(inner)]

    def _cond(self, equation: Equation) -> None:
        for body in equation.bodies:
            for value, inner in zip(equation.inputs[1:], body.inputs, strict=True):
                self._dims[inner] = self.axes(value)
            self._run(body)
            for value, inner in zip(equation.outputs, body.outputs, strict=True):
                self._same(value, inner, Reason(equation, "the result of a branch"))

    def _while(self, equation: Equation) -> None:
        condition, body = equation.bodies
        first = equation.params["cond_nconsts"]
        second = first + equation.params["body_nconsts"]
        of_condition = [*equation.inputs[:first], *equation.inputs[second:]]
        for inputs, program in ((of_condition, condition), (equation.inputs[first:], body)):
            for value, inner in zip(inputs, program.inputs, strict=True):
                self._dims[inner] = self.axes(value)
        self._run(condition)
        self._run(body)
        reason = Reason(equation, "a carry")
        for value, inner, output in zip(
            equation.inputs[second:], body.outputs, equation.outputs, strict=True
        ):
            self._same(inner, value, reason)
            self._dims[output] = self.axes(value)


def _entries(dims: Iterable[Axis]) -> int:
    return math.prod(dim.root.size for dim in dims)


def _works_along(equation: Equation) -> Callable[[int], bool]:
    """Whether an operation mixes the entries of an axis."""
    name, params = equation.name, equation.params
    if name == "pad":
        return lambda i: tuple(params["padding_config"][i]) != (0, 0, 0)
    if name == "rev":
        return lambda i: i in params["dimensions"]
    if name == "sort":
        return lambda i: bool(i == params["dimension"])
    if name in _CUMULATIVE:
        return lambda i: bool(i == params["axis"])
    if name in _WINDOWS:
        return lambda i: (
            (params["window_dimensions"][i], params["window_strides"][i]) != (1, 1)
            or tuple(params["padding"][i]) != (0, 0)
            or (params["base_dilation"][i], params["window_dilation"][i]) != (1, 1)
        )
    last = len(equation.inputs[0].shape) - 1
    if name == "top_k":
        return lambda i: i == last
    return lambda _: False  # dynamic_slice: sizes say along which axes


_RULES: dict[str, Callable[[Coupling, Equation], None]] = {
    "transpose": Coupling._transpose,
    "squeeze": Coupling._squeeze,
    "broadcast_in_dim": Coupling._broadcast,
    "reshape": Coupling._reshape,
    "concatenate": Coupling._concatenate,
    "split": Coupling._split,
    **dict.fromkeys(("stack", "unstack"), Coupling._stack),
    "tile": Coupling._tile,
    "slice": Coupling._slice,
    "dynamic_slice": Coupling._mixed,
    "pad": Coupling._mixed,
    "rev": Coupling._mixed,
    "sort": Coupling._mixed,
    "top_k": Coupling._mixed,
    **dict.fromkeys((*_CUMULATIVE, *_WINDOWS), Coupling._mixed),
    "dynamic_update_slice": Coupling._dynamic_update_slice,
    "dot_general": Coupling._dot,
    "ragged_dot_general": Coupling._ragged_dot,
    "conv_general_dilated": Coupling._convolution,
    "gather": Coupling._gather,
    "scan": Coupling._scan,
    "cond": Coupling._cond,
    "while": Coupling._while,
}
ANALYSED = ELEMENTWISE | REDUCTIONS | SOURCES | frozenset(_RULES)
