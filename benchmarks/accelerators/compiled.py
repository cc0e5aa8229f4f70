"""Reads kernels, bytes moved and bytes of collectives from the text of a compiled program.

The text is the scheduled program of one device. An instruction of the entry computation, or of a
loop or branch that runs, launches one kernel or copy, which reads its operands from the memory of
the device and writes its result there. Of arrays that a kernel slices or changes in place, the
slices count. Arrays in the memory of a TPU's core do not count: copies of them to and from the
memory of the device do.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

UNCOUNTED_TRIPS = 8  # of a loop that ends by its data: passes of four bits over keys of 32 bits

# Instructions that run nothing, or whose work the instruction that starts them counts.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all",
    "add-dependency", "partition-id", "replica-id", "get-dimension-size", "domain",
}  # fmt: skip
_COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-", "ragged-all-to-all",
)  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_NAME = re.compile(r"(?:ROOT )?%?([\w.\-]+) = ")


class Cost(NamedTuple):
    """Kernels and bytes of one run on a device.

    Attributes:
      kernels: number of kernels and copies.
      moved: bytes read from and written to the memory of the device.
      collectives: bytes of the results of collectives.
    """

    kernels: int = 0
    moved: int = 0
    collectives: int = 0

    def times(self, trips: int) -> Cost:
        """Returns the cost of a number of runs."""
        return Cost(*(trips * x for x in self))

    def plus(self, other: Cost) -> Cost:
        """Returns the cost of this and another run."""
        return Cost(*(x + y for x, y in zip(self, other, strict=True)))


class Instruction(NamedTuple):
    """A line of a program; `shape`, `operands` and `attributes` are texts."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str
    is_root: bool

    @property
    def operand_names(self) -> list[str]:
        """The names of the operands, in order."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    def called(self, attribute: str) -> str | None:
        """Returns the name of the computation of an attribute; `None` without the attribute."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match and match[1]

    def branches(self) -> list[str]:
        """Returns the names of the branches of a conditional."""
        match = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if match:
            return [name.strip().lstrip("%") for name in match[1].split(",")]
        return [str(self.called(f"{side}_computation")) for side in ("true", "false")]


class Computation(dict[str, Instruction]):
    """The instructions of a computation by name, in the order in which they run."""

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next(x for x in self.values() if x.is_root)

    def source(self, name: str) -> Instruction:
        """Returns the instruction that makes a value, behind copies and changes of shape."""
        instruction = self[name]
        while instruction.opcode in ("bitcast", "copy", "reshape"):
            instruction = self[instruction.operand_names[0]]
        return instruction

    def users(self, name: str) -> Iterator[tuple[Instruction, int]]:
        """Yields the instructions that read a value, behind changes of shape, and the operand."""
        for user in self.values():
            for i, operand in enumerate(user.operand_names):
                if operand == name and user.opcode == "bitcast":
                    yield from self.users(user.name)
                elif operand == name:
                    yield user, i

    def bytes_read(self, index: int) -> int | None:
        """Returns how many bytes of a parameter a fusion reads if it reads slices; else `None`."""
        parameters = (x for x in self.values() if x.opcode == "parameter")
        name = next(x.name for x in parameters if int(x.operands) == index)
        total = 0
        for user, operand in self.users(name):
            if user.opcode in _SLICES and operand == 0:
                total += count_bytes(user.shape)
            elif user.opcode != "dynamic-update-slice" or operand != 0:
                return None
        return total

    def bytes_written(self) -> int:
        """Returns how many bytes a fusion writes: of arrays changed in place, the new slices."""
        root = self.root
        names = root.operand_names if root.opcode == "tuple" else [root.name]
        return sum(self._bytes_of_result(self[name]) for name in names)

    def _bytes_of_result(self, result: Instruction) -> int:
        maker = self.source(result.name) if result.opcode == "bitcast" else result
        if maker.opcode == "dynamic-update-slice":
            return count_bytes(self[maker.operand_names[1]].shape)
        return count_bytes(result.shape)


def count_bytes(shape: str, *, is_any_memory: bool = False) -> int:
    """Returns the bytes of the arrays of a shape in the memory of the device, or in any memory."""
    total = 0
    for dtype, sizes, layout in _ARRAY.findall(shape):
        if is_any_memory or not re.search(r"S\([1-9]", layout):
            total += math.ceil(
                _bits(dtype) * math.prod(map(int, filter(None, sizes.split(",")))) / 8
            )
    return total


def _bits(dtype: str) -> int:
    match = re.match(r"(?:bf|[sufc])(\d+)", dtype)  # token and opaque have no bytes
    return 8 if dtype == "pred" else int(match[1]) if match else 0


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a program by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry = ""
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if head := _HEAD.match(line):
            computation = computations[head[2]] = Computation()
            entry = head[2] if head[1] else entry
        elif match := _NAME.match(line):
            instruction = _parse_instruction(match[1], line[match.end() :], line.startswith("ROOT"))
            computation[instruction.name] = instruction
    return computations, entry


def _parse_instruction(name: str, text: str, is_root: bool) -> Instruction:
    """Parses `shape opcode(operands), attributes`."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    start = text.index("(")
    end = start + _closing(text[start:])
    return Instruction(name, shape, text[:start], text[start + 1 : end - 1], text[end:], is_root)


def _closing(text: str) -> int:
    """Returns the position behind the parenthesis that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"a parenthesis does not close in {text!r}")


def read(text: str, *, is_update: bool) -> Cost:
    """Returns the cost of a step.

    An ordinary step takes the cheap branch of each conditional and skips the loops that run at most
    once; an update takes the expensive branch and runs these loops once.

    Args:
      text: `as_text()` of a compiled program.
      is_update: whether the step updates masks.
    """
    computations, entry = parse(text)
    choose: Callable[..., Cost] = max if is_update else min

    @functools.cache
    def cost(name: str) -> Cost:
        computation = computations[name]
        total = Cost()
        for instruction in computation.values():
            total = total.plus(cost_of_instruction(computation, instruction))
        return total

    def cost_of_instruction(computation: Computation, instruction: Instruction) -> Cost:
        opcode = instruction.opcode
        if opcode == "while":
            body, condition = (str(instruction.called(x)) for x in ("body", "condition"))
            if _runs_once(computations[condition]):
                return cost(body).times(int(is_update))
            match = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            trips = int(match[1]) if match else UNCOUNTED_TRIPS
            return cost(body).plus(cost(condition)).times(trips)
        if opcode == "conditional":
            branches = [cost(name) for name in instruction.branches()]
            return choose(branches, key=lambda x: (x.moved, x.kernels))
        if opcode == "call":
            return cost(str(instruction.called("to_apply")))
        if opcode == "async-start":
            return cost(str(instruction.called("calls")))
        return _launch(computations, computation, instruction)

    return cost(entry)


def _runs_once(condition: Computation) -> bool:
    """Returns whether a loop goes by a flag of its state, as a step that updates masks does."""
    root = condition.source(condition.root.name)
    return root.opcode == "get-tuple-element" and root.shape.startswith("pred[]")


def _launch(
    computations: dict[str, Computation], computation: Computation, instruction: Instruction
) -> Cost:
    """Returns the cost of an instruction that is no loop, branch or call."""
    opcode = instruction.opcode
    shapes = [computation[name].shape for name in instruction.operand_names]
    is_collective = opcode.startswith(_COLLECTIVES)
    if opcode in _FREE or "AllocateBuffer" in instruction.attributes:
        return Cost()
    if opcode.endswith(("-done", "-update")):  # the start of a collective repeats its operands
        nbytes = count_bytes(instruction.shape) if is_collective else 0
        return Cost(0, 2 * nbytes, nbytes)
    if opcode.endswith("-start"):
        return Cost(1) if is_collective else Cost(1, _bytes_copied(instruction.shape, shapes))
    return Cost(
        1,
        sum(_bytes_read(computations, instruction, shapes))
        + _bytes_written(computations, instruction, shapes),
        max(count_bytes(x, is_any_memory=True) for x in (instruction.shape, " ".join(shapes)))
        if is_collective
        else 0,
    )


def _bytes_copied(shape: str, operand_shapes: Sequence[str]) -> int:
    """Returns the bytes of a copy beside kernels; the shape is (target, source, ...)."""
    arrays = [match[0] for match in _ARRAY.finditer(shape)]
    size = min(count_bytes(x, is_any_memory=True) for x in arrays[:2])
    return size * sum(count_bytes(x) > 0 for x in arrays[:2])


def _bytes_read(
    computations: dict[str, Computation], instruction: Instruction, shapes: Sequence[str]
) -> Iterator[int]:
    fused = instruction.called("calls") if instruction.opcode == "fusion" else None
    for i, shape in enumerate(shapes):
        nbytes = count_bytes(shape)
        if nbytes and fused:
            sliced = computations[fused].bytes_read(i)
            nbytes = nbytes if sliced is None else min(sliced, nbytes)
        elif i == 0 and instruction.opcode in _SLICES:
            nbytes = min(nbytes, count_bytes(instruction.shape, is_any_memory=True))
        elif i == 0 and instruction.opcode == "dynamic-update-slice":
            nbytes = 0
        yield nbytes


def _bytes_written(
    computations: dict[str, Computation], instruction: Instruction, shapes: Sequence[str]
) -> int:
    fused = instruction.called("calls") if instruction.opcode == "fusion" else None
    nbytes = count_bytes(instruction.shape)
    if fused:
        return min(nbytes, computations[fused].bytes_written())
    return count_bytes(shapes[1]) if instruction.opcode == "dynamic-update-slice" else nbytes
