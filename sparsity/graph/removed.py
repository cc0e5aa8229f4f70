"""What stands where channels were masked: the second pass, which proves that they can be removed.

Masking sets a channel's parameters to 0; what later arrays hold at its places follows: 0 after a
product, 1 after `exp`. Removing the channel gives the same result if every operation that joins its
entries with others meets the value that changes nothing there: 0 in a sum, -inf in a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sparsity.graph.coupling import Coupling
from sparsity.programs import constants
from sparsity.programs.axes import Axis, Reason, variables
from sparsity.programs.primitives import ELEMENTWISE, REDUCTIONS
from sparsity.programs.products import read_product
from sparsity.programs.program import Equation, Program, Value

Place = tuple[int, Axis]  # an axis, and the variable whose removed entries are meant


class Known:
    """What is known of a value: a constant at removed places, or everywhere.

    Attributes:
      at: constants by place.
      everywhere: the constant that all entries are, `None` if they differ.
      may_be_nan: entries may be NaN in place of the constants, as where a lookup is out of range.
    """

    __slots__ = ("at", "everywhere", "may_be_nan")

    def __init__(
        self,
        at: Mapping[Place, float] | None = None,
        everywhere: float | None = None,
        may_be_nan: bool = False,
    ):
        self.at, self.everywhere, self.may_be_nan = dict(at or {}), everywhere, may_be_nan

    def __getitem__(self, place: Place) -> float | None:
        return self.at.get(place, self.everywhere)

    def moved(self, to: Callable[[int], int | None]) -> Known:
        """With other numbers of axes, `None` for an axis that is gone."""
        moved = {(to(i), v): c for (i, v), c in self.at.items()}
        at = {(i, v): c for (i, v), c in moved.items() if i is not None}
        return Known(at, self.everywhere, self.may_be_nan)

    def meet(self, other: Known) -> Known:
        """What holds of both."""
        at = {place: c for place, c in self.at.items() if constants.same(other[place], c)}
        at |= {place: c for place, c in other.at.items() if constants.same(self[place], c)}
        everywhere = self.everywhere if constants.same(self.everywhere, other.everywhere) else None
        return Known(at, everywhere, self.may_be_nan or other.may_be_nan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and repr(self._key()) == repr(other._key())

    __hash__ = None  # type: ignore[assignment]

    def _key(self) -> tuple[object, ...]:
        at = sorted((i, id(v), c) for (i, v), c in self.at.items())
        return self.everywhere, self.may_be_nan, at


class Removed:
    """Follows removed entries through a program.

    Args:
      program: the program.
      coupling: its axes.
      masked: its inputs that are 0 where a channel is removed.

    Attributes:
      refused: variables that cannot lose entries, and why.
    """

    def __init__(self, program: Program, coupling: Coupling, masked: Iterable[Value]):
        self._coupling = coupling
        self._known: dict[Value, Known] = {}
        self._free: dict[Value, list[list[Axis]]] = {}
        self.refused: dict[Axis, Reason] = {}
        for value in masked:
            self._known[value] = Known(dict.fromkeys(self._places(value), 0.0))
        self._run(program)

    def _variables(self, value: Value) -> list[list[Axis]]:
        """Of each axis, the variables that the first pass left free."""
        if value not in self._free:
            dims = self._coupling.axes(value)
            self._free[value] = [[v for v in variables(dim) if v.pin is None] for dim in dims]
        return self._free[value]

    def _places(self, value: Value) -> list[Place]:
        return [(i, v) for i, found in enumerate(self._variables(value)) for v in found]

    def _of(self, value: Value) -> Known:
        if value not in self._known:
            self._known[value] = Known(everywhere=constants.value(value.known))
        return self._known[value]

    def _refuse(self, variable: Axis, reason: Reason) -> None:
        self.refused.setdefault(variable, reason)

    def _run(self, program: Program, with_rules: bool = True) -> None:
        for equation in program.flat():
            name = equation.name
            if name in ELEMENTWISE:
                self._elementwise(equation)
            elif name in REDUCTIONS:
                self._reduction(equation)
            elif name in _RULES:
                _RULES[name](self, equation)
            # What else there is makes new entries, or is pinned.
            if any(self._of(value).may_be_nan for value in equation.inputs):
                for output in equation.outputs:
                    constant = self._of(output)
                    self._known[output] = Known(constant.at, constant.everywhere, may_be_nan=True)
        for equation in program.with_rules() if with_rules else ():
            rule = equation.derivative
            assert rule is not None  # it has one
            known = [self._of(value) for value in equation.inputs]
            self._known.update(zip(rule.inputs, known, strict=False))
            if equation.name == "custom_jvp_call":  # what is constant has no tangent
                tangents = rule.inputs[len(known) :]
                for value, tangent in zip(equation.differentiated[0], tangents, strict=True):
                    self._known[tangent] = Known(dict.fromkeys(self._of(value).at, 0.0))
            self._run(rule, with_rules=False)

    def _elementwise(self, equation: Equation) -> None:
        known = [self._of(value) for value in equation.inputs]
        if len(equation.outputs) > 1:
            self._known.update(zip(equation.outputs, known, strict=True))
            return
        (output,) = equation.outputs
        if any(x.may_be_nan for x in known) and constants.tells_nan(equation):
            self._known[output] = Known()
            return
        at: dict[Place, float | None] = {}
        results: dict[tuple[float | None, ...], float | None] = {}
        for place in (place for of_input in known for place in of_input.at if place not in at):
            found = tuple([of_input[place] for of_input in known])
            if found not in results:
                results[found] = constants.result(equation, found)
            at[place] = results[found]
        everywhere = constants.result(equation, [of_input.everywhere for of_input in known])
        self._known[output] = Known({p: c for p, c in at.items() if c is not None}, everywhere)

    def _reduction(self, equation: Equation) -> None:
        (value,), axes, name = equation.inputs, equation.params["axes"], equation.name
        known, neutral = self._of(value), constants.neutral(name, value.dtype)
        for axis in axes:
            for variable in self._variables(value)[axis]:
                found = known[axis, variable]
                if neutral is None or found != neutral:
                    self._refuse(variable, _unlike(equation, found, neutral))
        left = [i for i in range(len(value.shape)) if i not in axes]
        moved = known.moved(lambda i: left.index(i) if i in left else None)
        is_empty = 0 in [value.shape[axis] for axis in axes]
        self._known[equation.outputs[0]] = Known() if is_empty else _joined(name, moved)

    def _transpose(self, equation: Equation) -> None:
        order = tuple(equation.params["permutation"])
        self._known[equation.outputs[0]] = self._of(equation.inputs[0]).moved(order.index)

    def _squeeze(self, equation: Equation) -> None:
        value, gone = equation.inputs[0], equation.params["dimensions"]
        left = [i for i in range(len(value.shape)) if i not in gone]
        known = self._of(value).moved(lambda i: left.index(i) if i in left else None)
        self._known[equation.outputs[0]] = known

    def _broadcast(self, equation: Equation) -> None:
        axes = equation.params["broadcast_dimensions"]
        self._known[equation.outputs[0]] = self._of(equation.inputs[0]).moved(lambda i: axes[i])

    def _rearranged(self, equation: Equation) -> None:
        """Outputs whose entries are those of some inputs, in other places."""
        inputs = equation.inputs[: _SOURCES.get(equation.name, 1)]
        for output in equation.outputs:
            self._known[output] = self._gathered(output, inputs)

    def _gather(self, equation: Equation) -> None:
        """Entries that are looked up, and what stands in for those out of range."""
        (output,) = equation.outputs
        known, fill = self._gathered(output, equation.inputs[:1]), constants.fill(equation)
        if fill is None:
            self._known[output] = known
        elif math.isnan(fill):
            self._known[output] = Known(known.at, known.everywhere, may_be_nan=True)
        else:
            self._known[output] = known.meet(Known(everywhere=fill))

    def _gathered(self, output: Value, inputs: Sequence[Value]) -> Known:
        """What all entries of the inputs agree on at places of the output."""
        at: dict[Place, float] = {}
        for axis, variable in self._places(output):
            found = [
                self._of(value)[i, variable]
                for value in inputs
                for i, there in enumerate(self._variables(value))
                if variable in there
            ]
            # A value without the variable, as what pads, lies at its places, too.
            found += [
                self._of(value).everywhere
                for value in inputs
                if not value.shape and not any(self._variables(value))
            ]
            if any(c is not None and c != c for c in found):
                at[axis, variable] = math.nan
            elif found and found[0] is not None and all(c == found[0] for c in found):
                at[axis, variable] = found[0]
        uniform = [self._of(value).everywhere for value in inputs]
        alike = all(c is not None and c == uniform[0] for c in uniform)
        return Known(at, uniform[0] if alike else None)

    def _each(self, equation: Equation) -> None:
        """Sorted values: each output has the entries of its input."""
        for value, output in zip(equation.inputs, equation.outputs, strict=False):
            self._known[output] = self._gathered(output, [value])

    def _window(self, equation: Equation) -> None:
        """Entries joined with others of the same channel."""
        (output,), params = equation.outputs, equation.params
        if "padding" in params and _may_be_empty(params):
            return
        known = self._gathered(output, equation.inputs[:1])
        name = {"cumsum": "reduce_sum", "cumprod": "reduce_prod"}.get(
            equation.name, equation.name.replace("window_", "").replace("cum", "reduce_")
        )
        self._known[output] = _joined(name, known)

    def _dot(self, equation: Equation) -> None:
        product, values = read_product(equation), equation.inputs
        facts = [self._of(value) for value in values]
        for axes in zip(product.left.contracted, product.right.contracted, strict=True):
            for variable in self._variables(values[0])[axes[0]]:
                factors = facts[0][axes[0], variable], facts[1][axes[1], variable]
                if constants.product(*factors) != 0:
                    self._refuse(variable, _not_zero(equation, factors))
        at: dict[Place, float | None] = {}
        batch = dict(zip(product.left.batch, product.right.batch, strict=True))
        for place, source in enumerate(product.output):
            if source is None:
                continue
            operand, axis = source
            for variable in self._variables(values[operand])[axis]:
                other = facts[1][batch[axis], variable] if not operand and axis in batch else None
                at[place, variable] = constants.summed(facts[operand][axis, variable], other)
        self._known[equation.outputs[0]] = Known({p: c for p, c in at.items() if c is not None})

    def _convolution(self, equation: Equation) -> None:
        (image, kernel), (output,) = equation.inputs, equation.outputs
        product = read_product(equation)
        (features, *_), (ins, *_) = product.left.contracted, product.right.contracted
        (outs,) = product.right.free
        of_image, of_kernel = self._of(image), self._of(kernel)
        for variable in self._variables(kernel)[ins]:
            found = of_image[features, variable], of_kernel[ins, variable]
            if constants.product(*found) != 0:
                self._refuse(variable, _not_zero(equation, found))
        at: dict[Place, float | None] = {}
        axis = product.output.index((1, outs))
        for variable in self._variables(output)[axis]:
            of_group = of_image[features, variable] if product.groups > 1 else None
            at[axis, variable] = constants.summed(of_kernel[outs, variable], of_group)
        self._known[output] = Known({p: c for p, c in at.items() if c is not None})

    def _scan(self, equation: Equation) -> None:
        fixed, count = equation.params["num_consts"], equation.params["num_carry"]
        (body,) = equation.bodies
        known = [self._of(value) for value in equation.inputs]
        sliced = [k.moved(lambda i: i - 1 if i else None) for k in known[fixed + count :]]
        carried = self._until_stable(
            known[fixed : fixed + count],
            lambda carry: self._run_body(body, [*known[:fixed], *carry, *sliced])[:count],
        )
        self._known.update(zip(equation.outputs, carried, strict=False))
        for output, inner in zip(equation.outputs[count:], body.outputs[count:], strict=True):
            self._known[output] = self._of(inner).moved(lambda i: i + 1)

    def _while(self, equation: Equation) -> None:
        condition, body = equation.bodies
        first = equation.params["cond_nconsts"]
        second = first + equation.params["body_nconsts"]
        known = [self._of(value) for value in equation.inputs]
        carried = self._until_stable(
            known[second:],
            lambda carry: self._run_body(body, [*known[first:second], *carry]),
        )
        self._run_body(condition, [*known[:first], *carried])
        self._known.update(zip(equation.outputs, carried, strict=True))

    def _cond(self, equation: Equation) -> None:
        known = [self._of(value) for value in equation.inputs[1:]]
        results = [self._run_body(body, known) for body in equation.bodies]
        for number, output in enumerate(equation.outputs):
            found = results[0][number]
            for result in results[1:]:
                found = found.meet(result[number])
            self._known[output] = found

    def _run_body(self, body: Program, known: Sequence[Known]) -> list[Known]:
        for value, of_input in zip(body.inputs, known, strict=True):
            self._known[value] = of_input
        self._run(body)
        return [self._of(value) for value in body.outputs]

    def _until_stable(
        self, carry: list[Known], step: Callable[[list[Known]], list[Known]]
    ) -> list[Known]:
        """What holds of a carry before and after every step."""
        while True:
            after = step(carry)
            met = [one.meet(other) for one, other in zip(carry, after, strict=True)]
            if met == carry:
                return carry
            carry = met


def _joined(name: str, known: Known) -> Known:
    """What is known after a reduction of entries that are alike."""
    at = {place: constants.joined(name, constant) for place, constant in known.at.items()}
    return Known({place: constant for place, constant in at.items() if constant is not None})


def _may_be_empty(params: Mapping[str, Any]) -> bool:
    """Whether a window may hold none of the entries."""
    names = ("window_dimensions", "padding", "base_dilation", "window_dilation")
    return any(
        max(*pads, holes - 1) >= size or step > 1
        for size, pads, holes, step in zip(*(params[name] for name in names), strict=True)
    )


def _unlike(equation: Equation, found: float | None, neutral: float | None) -> Reason:
    if neutral is None:
        return Reason(equation, "it tells where in the axis an entry lies")
    what = "not known" if found is None else f"{found:g}"
    text = f"it joins entries that are {what} where channels are masked, not {neutral:g}"
    return Reason(equation, text)


def _not_zero(equation: Equation, found: tuple[float | None, float | None]) -> Reason:
    shown = ["not known" if x is None else f"{x:g}" for x in found]
    text = f"it sums products whose factors are {' and '.join(shown)} where channels are masked"
    return Reason(equation, text)


_MOVED = ("dynamic_slice", "reshape", "rev", "slice", "split", "tile", "unstack")
# How many of the first inputs the entries of an output come from, if not from one: `None` is all.
_SOURCES = {"concatenate": None, "pad": None, "stack": None, "dynamic_update_slice": 2}

_RULES: dict[str, Callable[[Removed, Equation], None]] = {
    "transpose": Removed._transpose,
    "squeeze": Removed._squeeze,
    "broadcast_in_dim": Removed._broadcast,
    "gather": Removed._gather,
    "sort": Removed._each,
    "top_k": Removed._each,
    **dict.fromkeys((*_MOVED, *_SOURCES), Removed._rearranged),
    **dict.fromkeys(("cummax", "cummin", "cumprod", "cumsum"), Removed._window),
    **dict.fromkeys([f"reduce_window_{x}" for x in ("max", "min", "sum")], Removed._window),
    **dict.fromkeys(("dot_general", "ragged_dot_general"), Removed._dot),
    "conv_general_dilated": Removed._convolution,
    "scan": Removed._scan,
    "while": Removed._while,
    "cond": Removed._cond,
}
