"""The blocks of a program: the spans of equations that a run prunes, refits and writes at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sparsity.calibration.statistics.capture import Calibration
from sparsity.core import trees
from sparsity.core.trees import Path
from sparsity.programs.program import Equation, Program, Value

BlockNameFn: TypeAlias = Callable[[Path], str]


class Span(NamedTuple):
    """Equations in a row.

    Attributes:
      start: the index of the first equation.
      stop: the index after the last one.
      name: the name of the block; empty if the equations read no weight to prune.
      is_scan: whether the span is a scan that runs layer by layer.
    """

    start: int
    stop: int
    name: str = ""
    is_scan: bool = False


class BlockPlan:
    """The blocks of a program, and the places where it stops.

    Args:
      calibration: the uses of the weights to prune.
      names: the name of the block of each parameter to prune.
      window: the number of blocks in a row that are refitted and written together.
    """

    def __init__(
        self, calibration: Calibration, names: Mapping[Path, str], window: int = 1
    ) -> None:
        self.calibration, self.window, self._names = calibration, window, names
        products = calibration.graph.tracker.products
        self._layered = {scan for use in products for scan in use.view.scans}
        self._spans: dict[Program, list[Span]] = {}

    def is_layered(self, equation: Equation) -> bool:
        """Returns whether an equation is a scan that takes weights apart."""
        return equation in self._layered

    def list_uses(self, equation: Equation) -> list[int]:
        """Returns the weights that an equation reads, in loops and branches, too."""
        uses = self.calibration.uses
        return [*uses.find(equation), *uses.list_inner(equation)]

    def name_scan(self, equation: Equation) -> str:
        """Returns the name of a scan that runs layer by layer: what its weights have in common."""
        products = self.calibration.graph.tracker.products
        names = [use.path for use in products if equation in use.view.scans]
        shared = [x for x, *others in zip(*names, strict=False) if {*others} <= {x}]
        return trees.join_names(shared or names[0])

    def split(self, program: Program) -> list[Span]:
        """Returns the spans of a program in order; those of a step of a scan are one block."""
        if program not in self._spans:
            self._spans[program] = self._join_windows(_make_names_unique(self._split(program)))
        return self._spans[program]

    def count_blocks(self, program: Program) -> int:
        """Counts the blocks that a run finishes."""
        equations = [*program.flat_equations()]
        count = 0
        for span in self.split(program):
            if span.is_scan:
                (body,) = equations[span.start].list_bodies()
                length = equations[span.start].length
                if self.is_nested(body.program):
                    count += length * self.count_blocks(body.program)
                else:
                    count += -(-length // self.window)
            else:
                count += bool(span.name)
        return count

    def is_nested(self, program: Program) -> bool:
        """Returns whether a program has scans that run layer by layer."""
        return any(map(self.is_layered, program.flat_equations()))

    def measure_live(self, program: Program) -> list[int]:
        """Returns the bytes of data that are live before each equation, and after the last."""
        equations = [*program.flat_equations()]
        last = {value: i for i, equation in enumerate(equations) for value in equation.inputs}
        last |= dict.fromkeys(program.outputs, len(equations))
        made = dict.fromkeys(program.inputs, 0)
        made |= {x: i + 1 for i, equation in enumerate(equations) for x in equation.outputs}
        live = [0] * (len(equations) + 1)
        for value, start in made.items():
            if self.calibration.graph.tracker.is_data(value):
                for i in range(start, last.get(value, -1) + 1):
                    live[i] += count_bytes(value)
        return live

    def list_params(self, program: Program, values: Iterable[Value]) -> set[Value]:
        """Returns the inputs of a program that values need which no data changes."""
        pending, params = [*values], set[Value]()
        while pending:
            value = pending.pop()
            if self.calibration.graph.tracker.is_data(value):
                continue
            if value in program.makers:
                pending += program.makers[value].inputs
            elif value in program.inputs:
                params.add(value)
        return params

    def list_read_once(self) -> list[Path]:
        """Returns the parameters that one block reads, and not what follows the blocks."""
        model = self.calibration.graph.model
        program, counts = model.program, self._count_readers(model.program)
        equations = [*program.flat_equations()][self.split(program)[-1].start :]
        read_late = [value for equation in equations for value in equation.inputs]
        late = self.list_params(program, [*read_late, *program.outputs])
        return [
            parameter.path
            for value, parameter in model.parameter_inputs.items()
            if counts[value] == 1 and value not in late
        ]

    def _count_readers(self, program: Program) -> Counter[Value]:
        """Counts the equations with data that read each input; several blocks are two at least."""
        counts = Counter[Value]()
        for equation in program.flat_equations():
            if not any(map(self.calibration.graph.tracker.is_data, equation.outputs)):
                continue
            if not self.is_layered(equation):
                counts.update(self.list_params(program, equation.inputs))
                continue
            (body,) = equation.list_bodies()
            inner, stacks = self._count_readers(body.program), body.split(body.program.inputs)[2]
            for value, inside in zip(body.inputs, body.program.inputs, strict=True):
                times = 1 if inside in stacks else equation.length
                for param in self.list_params(program, [value]):
                    counts[param] += times * inner[inside]
        return counts

    def _join_windows(self, spans: Sequence[Span]) -> list[Span]:
        """Returns the spans with `window` blocks in a row as one."""
        joined, count = list[Span](), 0
        for span in spans:
            is_row = bool(joined and joined[-1].name and span.name)
            is_row = is_row and not (joined[-1].is_scan or span.is_scan)
            if is_row and count < self.window:
                name, count = f"{joined[-1].name}, {span.name}", count + 1
                joined[-1] = Span(joined[-1].start, span.stop, name)
            else:
                joined.append(span)
                count = 1
        return joined

    def _split(self, program: Program) -> list[Span]:
        equations = [*program.flat_equations()]
        live = self.measure_live(program)
        spans, start, name, last_stop = list[Span](), 0, "", -1
        for index, equation in enumerate(equations):
            if self.is_layered(equation):
                spans += [Span(start, index, name)] if index > start else []
                spans.append(Span(index, index + 1, self.name_scan(equation), is_scan=True))
                start, name = index + 1, ""
            elif uses := self.list_uses(equation):
                block = self._names[self.calibration.uses[uses[0]].path]
                if name and name != block:  # cut where the fewest bytes pass
                    cut = min(range(last_stop + 1, index + 1), key=lambda i: (live[i], i))
                    spans.append(Span(start, cut, name))
                    start = cut
                name = block
            else:
                continue
            last_stop = index
        end = len(equations)
        if name:  # what follows the block, such as logits, belongs to none
            end = min(range(last_stop + 1, end + 1), key=lambda i: (live[i], i))
        tail = Span(end, len(equations))
        return [*spans, Span(start, end, name), *([tail] if end < tail.stop else [])]


def _make_names_unique(spans: Sequence[Span]) -> list[Span]:
    """Returns spans with a number behind names that came before."""
    counts, unique = Counter[str](), list[Span]()
    for span in spans:
        counts[span.name] += bool(span.name)
        number = f" ({counts[span.name]})" if counts[span.name] > 1 else ""
        unique.append(span._replace(name=span.name + number))
    return unique


def count_bytes(value: Value) -> int:
    """Returns the bytes of a value."""
    return value.size * int(value.dtype.itemsize)
