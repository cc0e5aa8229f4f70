"""Proofs about optimizers, from the programs of `init` and `update`, which are never run.

`check_entrywise` proves that an optimizer trains the entries that remain of parameters as it trains
them inside the complete parameters; `shrink`, `compact`, `use_compact_state` and `train_only` ask
here. The optimizer is traced for the complete parameters, and for what remains. A sum of squares
passes where gradients, parameters and moments of removed entries are 0. A mean, a factored moment,
a matrix product, noise, or a decision by the number of axes fails.

`find_frozen` returns the parameters that an optimizer never moves: their updates are always 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import owners, trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import KeyPath, Params, PyTree
from sparsity.programs import entrywise
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS
from sparsity.programs.program import Equation, Program, Value, read_jaxpr
from sparsity.programs.walk import Flow

Arrays: TypeAlias = Sequence[jax.Array]
Shapes = dict[Value, tuple[int, ...]]

# Parameters of operations that follow from shapes.
_SHAPES = {"shape", "broadcast_dimensions", "axes", "sharding", "out_sharding"}
_BODIES = {"jaxpr", "branches", "cond_jaxpr", "body_jaxpr"}
_DEPENDS = "depends on the number of axes of an array, or on their sizes"
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
# The name of a function within a transformation, as optax writes them.
_UPDATE = re.compile(r"(?!chain\.|with_extra_args_support\.)(\w+)\.(<locals>\.)?\w*update")


class Removed(NamedTuple):
    """Removed entries of parameters, and what is certain of them.

    Attributes:
      are_zero: whether training keeps the entries at 0.
      have_gradients: whether the optimizer may get gradients other than 0 for the entries.
      read: `read(path, array)` returns the entries of an array of the shape of a parameter; `None`
        where only shapes are known.
    """

    are_zero: bool
    have_gradients: bool
    read: Callable[[KeyPath, PyTree], PyTree] = lambda path, array: None


class States(NamedTuple):
    """States from which training continues: of complete parameters, and of what remains."""

    complete: PyTree
    kept: PyTree


def check_entrywise(
    tx: optax.GradientTransformation,
    params: Params,
    kept: PyTree,
    removed: Sequence[Removed],
    *,
    remedy: str,
    claim: str,
    states: States | None = None,
    masks_move: bool = False,
) -> None:
    """Raises a ValueError unless an optimizer trains what remains as in the complete parameters.

    Args:
      tx: the optimizer.
      params: tree of parameters.
      kept: the same tree with the remaining entries in place of each parameter that loses some.
      removed: kinds of removed entries; together all.
      remedy: says what to do, for the error.
      claim: says what might not hold, for the error.
      states: the states from which training continues; by default those of `init`.
      masks_move: whether entries are removed later, too, whose moments are not 0.
    """
    pairs = zip(*(trees.split_arrays(tree)[0] for tree in (params, kept)), strict=True)
    shapes = [(array.shape, small.shape) for array, small in pairs]
    cut = [i for i, pair in enumerate(shapes) if are_of_other_shape(*pair)]
    if not cut:
        return
    remedy = f"{remedy}, or use an optimizer that works entry by entry"
    reason = "its update cannot be traced from gradients, state, params and a value alone"
    try:
        traced = _trace(tx, params, states and states.complete)
        reason = "it fails on arrays of other shapes"
        twin = _trace(tx, kept, states and states.kept)
    except Exception as error:  # the optimizer is the user's code
        message = str(error).split("\n")[0].rstrip(".")
        raise ValueError(f"{remedy}: {reason} ({message}). {claim}") from error
    try:
        for entries in removed:
            _check_steps(traced, twin, entries, cut, masks_move)
    except EntriesMeetError as error:
        raise ValueError(f"{remedy}: {error}. {claim}") from None


def find_frozen(tx: optax.GradientTransformation, params: Params) -> set[KeyPath]:
    """Returns the paths of the parameters that an optimizer never moves.

    Returns no path for an optimizer that moves no parameter at all, or that needs arguments of the
    training loop. Numbers of the state that the update leaves alone, such as injected learning
    rates, are for others to set, and count as unknown.

    Example:
      >>> tx = optax.masked(optax.set_to_zero(), {"base": True, "head": False})
      >>> find_frozen(tx, {"base": jnp.ones(2), "head": jnp.ones(2)})
      {(DictKey(key='base'),)}
    """
    try:
        traced = _trace(tx, params)
    except Exception:  # the optimizer is the user's code
        return set()
    flow, unknown = EntryFlow([], {}), [EntryFact() for _ in traced.paths]
    first, outputs = flow.follow(traced.init, unknown), traced.update.outputs[len(unknown) :]
    origins = [find_origin(traced.update.makers, x) for x in outputs]
    rows = zip(first, origins, traced.old_state, strict=True)
    state = [EntryFact() if origin is old else fact for fact, origin, old in rows]
    facts = _follow_steps(flow, traced.update, unknown, unknown, state, set())
    frozen = {path for path, x in zip(traced.paths, facts, strict=False) if x.constant == 0}
    return frozen if len(frozen) < len(traced.paths) else set()


class EntryFact(NamedTuple):
    """Certain properties of a value.

    Attributes:
      owner: index of the parameter whose entries an array holds, `None` for other values.
      constant: the value of the removed entries, or of all entries of a value without an owner;
        `None` if uncertain.
      error: why the value would be another one without the removed entries, "" if it would not. A
        selection may leave such a value out.
    """

    owner: int | None = None
    constant: float | None = None
    error: str = ""


class EntriesMeetError(Exception):
    """Entries that remain would be computed otherwise; the text says where and why."""


Facts: TypeAlias = list[EntryFact]


class _Traced(NamedTuple):
    """Programs of an optimizer.

    Attributes:
      init: maps the arrays of the parameters to those of the state; empty if a state is given.
      update: maps arrays of parameters, gradients and state, and a value, to updates and arrays of
        the state.
      paths: paths of the arrays of the parameters.
      arrays: the arrays of the parameters.
      owners: for each array of the state the index of its parameter, `None` for others.
      state: the arrays of the state that is given, `None` for that of `init`.
      old_state: inputs of `update`, the values of the state.
    """

    init: Program
    update: Program
    paths: list[KeyPath]
    arrays: list[PyTree]
    owners: list[int | None]
    state: list[PyTree] | None
    old_state: list[Value]


def _check_steps(
    traced: _Traced, twin: _Traced, removed: Removed, cut: Sequence[int], masks_move: bool
) -> None:
    """Raises an EntriesMeetError if removed entries matter.

    Args:
      traced: the optimizer of the complete parameters.
      twin: the optimizer of what remains.
      removed: the removed entries.
      cut: indices of the parameters that lose entries.
      masks_move: as in `check_entrywise`.
    """
    names, paths = [trees.path_string(path) for path in traced.paths], traced.paths
    shapes = pair_programs(traced.init, twin.init) | pair_programs(traced.update, twin.update)
    flow = EntryFlow(names, shapes)
    weights, grads, held = [EntryFact() for _ in names], [EntryFact() for _ in names], set[int]()
    for owner in cut:
        entries = removed.read(paths[owner], traced.arrays[owner])
        is_empty = entries is not None and not entries.size
        if is_empty or removed.are_zero:
            held.add(owner)
        weights[owner] = EntryFact(owner, 0.0 if owner in held else find_constant(entries))
        grads[owner] = EntryFact(owner, 0.0 if is_empty or not removed.have_gradients else None)
    if traced.state is None:
        state = flow.follow(traced.init, weights)
    else:
        state = [EntryFact(None, find_constant(array)) for array in traced.state]
    for i, (index, value) in enumerate(zip(traced.owners, traced.old_state, strict=True)):
        if index is None or not flow.is_cut(value) or state[i].owner is not None:
            continue
        if value.shape != traced.arrays[index].shape:
            state[i] = EntryFact(
                error=f"the state of {names[index]!r} has no number for each entry"
            )
        elif traced.state is None:
            state[i] = EntryFact(index, state[i].constant)
        else:
            entries = removed.read(paths[index], traced.state[i])
            state[i] = EntryFact(index, find_constant(entries))
    if masks_move:
        state = [fact._replace(constant=None) for fact in state]
    facts = _follow_steps(flow, traced.update, weights, grads, state, held)
    trained: list[int | None] = [*range(len(names)), *traced.owners]
    for trainee, fact in zip(trained, facts, strict=True):
        # A state without the paths of the parameters cannot follow masks that move.
        if fact.owner not in (None, trainee) and (trainee is not None or masks_move):
            raise EntriesMeetError("entries of one parameter train another")


def _follow_steps(
    flow: EntryFlow, update: Program, weights: Facts, grads: Facts, state: Facts, held: set[int]
) -> Facts:
    """Returns facts of updates and state that hold in all steps.

    Args:
      flow: the flow.
      update: program of the update.
      weights: facts of the parameters before the first step.
      grads: facts of the gradients, which hold in every step.
      state: facts of the state before the first step.
      held: indices of parameters whose facts hold in every step.
    """
    before, facts = None, list[EntryFact]()
    while before != (weights, state):
        before = weights, state
        facts = flow.follow(update, [*weights, *grads, *state, EntryFact()])
        state = [flow.join(*pair) for pair in zip(state, facts[len(weights) :], strict=True)]
        weights = [  # of a parameter that moves, nothing is certain
            fact if i in held or facts[i].constant == 0 else EntryFact(fact.owner)
            for i, fact in enumerate(weights)
        ]
    return [*facts[: len(weights)], *state]


def _trace(
    tx: optax.GradientTransformation, params: Params, state: PyTree | None = None
) -> _Traced:
    """Returns the programs of an optimizer, for abstract arrays; by default for a first state."""
    by_path = {x: leaf for x, leaf in trees.leaves_by_path(params).items() if trees.is_array(leaf)}
    arrays, rebuild = trees.split_arrays(jax.tree.map(_describe, params))
    init, state_arrays = Program([], [], []), None if state is None else jax.tree.leaves(state)

    if state is None:
        make_init = jax.make_jaxpr(lambda arrays: tx.init(rebuild(arrays)), return_shape=True)
        jaxpr, state = make_init(arrays)
        init = read_jaxpr(jaxpr)
    structs, treedef = jax.tree.flatten(jax.eval_shape(lambda: state))

    def update(arrays: Arrays, grads: Arrays, state: Arrays, value: jax.Array) -> PyTree:
        likes = [x if trees.is_prunable(x) else np.zeros(x.shape, jax.dtypes.float0) for x in grads]
        inputs = rebuild(likes), jax.tree.unflatten(treedef, state), rebuild(arrays)
        try:
            updates, new = optax.with_extra_args_support(tx).update(*inputs, value=value)
        except TypeError:  # of a transformation that takes arguments, but no value
            updates, new = tx.update(*inputs)
        if len(new_state := jax.tree.leaves(new)) != len(state):
            raise ValueError("its state changes its structure")
        moved = trees.leaves_by_path(updates)
        return [moved[x] if trees.is_prunable(y) else 0 for x, y in by_path.items()], new_state

    value = jax.ShapeDtypeStruct((), jnp.float32)
    program = read_jaxpr(jax.make_jaxpr(update)(arrays, arrays, structs, value))
    indices = owners.list_owners(rebuild(range(len(arrays))), state)
    olds = program.inputs[2 * len(arrays) : -1]
    return _Traced(init, program, [*by_path], [*by_path.values()], indices, state_arrays, olds)


def _describe(leaf: PyTree) -> PyTree:
    """Returns the abstract array of a leaf, without a sharding; other leaves stay."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if trees.is_array(leaf) else leaf


class EntryFlow(Flow[EntryFact]):
    """Flow of entries through a program.

    Args:
      names: names of the parameters.
      kept_shapes: {value: shape in the program of what remains}; others are of one shape in both.
    """

    def __init__(self, names: Sequence[str], kept_shapes: Shapes) -> None:
        super().__init__()
        self._names, self._kept_shapes = names, kept_shapes
        self._makers: dict[Value, Equation] = {}

    def follow(self, program: Program, inputs: Sequence[EntryFact]) -> list[EntryFact]:
        """Returns the facts of the outputs of a program.

        Raises:
          EntriesMeetError: what remains would be computed otherwise.
        """
        self.facts.update(zip(program.inputs, inputs, strict=True))
        self.run(program)
        return [self.fact(output) for output in program.outputs]

    # Hooks of `Flow`.

    def run(self, program: Program) -> None:
        self._makers |= program.makers
        super().run(program)
        _check_facts(map(self.fact, program.outputs))

    def initial_fact(self, value: Value) -> EntryFact:
        return EntryFact(None, find_constant(value.constant))

    def visit(self, equation: Equation) -> None:
        facts = [self.fact(value) for value in equation.inputs]
        condition = self._describe_condition(equation)
        for index, (value, fact) in enumerate(zip(equation.inputs[1:], facts[1:], strict=True)):
            if condition is not None and fact.error:
                facts[1 + index] = self._assume(value, condition, index, {})
        try:
            fact = self._apply(equation, facts)
        except EntriesMeetError as error:
            fact = EntryFact(error=str(error))
        self.facts.update(dict.fromkeys(equation.outputs, fact))

    def join(self, one: EntryFact, other: EntryFact, *_: object) -> EntryFact:
        constant = one.constant if entrywise.is_same(one.constant, other.constant) else None
        return EntryFact(self._join_owners([one, other]), constant)

    def enters(self, equation: Equation) -> bool:
        _check_facts(map(self.fact, equation.inputs))
        is_apart = equation.name in ("scan", "shard_map")  # takes arrays apart
        return not (is_apart and any(map(self.is_cut, (*equation.inputs, *equation.outputs))))

    # Rules.

    def _assume(
        self, value: Value, condition: Hashable, index: int, memo: dict[Value, EntryFact]
    ) -> EntryFact:
        """Returns the fact of a value where selections by a condition select the operand `index`.

        `optax.safe_norm` selects x or ones, takes a norm, and selects the norm where it was that
        of x: only in this case removed entries do not change the norm.
        """
        maker, fact = self._makers.get(value), memo.get(value, self.fact(value))
        if value in memo or maker is None or maker.inner_programs or fact.constant is not None:
            return fact
        if self._describe_condition(maker) == condition:
            return self.fact(maker.inputs[1 + index])
        try:
            facts = [self._assume(x, condition, index, memo) for x in maker.inputs]
            memo[value] = self._apply(maker, facts)
        except EntriesMeetError as error:
            memo[value] = EntryFact(error=str(error))
        return memo[value]

    def _describe_condition(self, equation: Equation) -> Hashable:
        """Returns what is equal for selections by one number that is computed in the same way.

        `None` for other equations, and where each entry has a condition of its own.
        """
        value = find_origin(self._makers, equation.inputs[0]) if equation.inputs else None
        if equation.name != "select_n" or value is None or value.size > 1:
            return None
        maker = self._makers.get(value)
        if maker is None or maker.name not in _COMPARISONS:
            return value
        origins = [find_origin(self._makers, x) for x in maker.inputs]
        numbers = [find_constant(x.constant) for x in origins]
        return maker.name, *(x if n is None else n for x, n in zip(origins, numbers, strict=True))

    def _apply(self, equation: Equation, facts: Sequence[EntryFact]) -> EntryFact:
        """Returns the fact of the results of an equation; raises an error if entries meet."""
        _check_facts(facts)
        name, (output, *others) = equation.name, equation.outputs
        if _is_view(equation):
            return facts[0]
        is_cut = [self.is_cut(value) for value in equation.inputs]
        if name in REDUCTIONS and not self.is_cut(output):
            neutral, constant = REDUCTIONS[name].neutral, facts[0].constant
            if not is_cut[0]:
                repeated = None if constant is None else entrywise.repeat_constant(name, constant)
                return EntryFact(None, repeated)
            if neutral is None or constant != neutral(equation.inputs[0].dtype):
                self._refuse(equation, "returns another number without the removed entries")
            return EntryFact()
        pairs = zip(equation.inputs, is_cut, strict=True)
        is_alike = not any(is_cut) or all(cut or x.size == 1 for x, cut in pairs)
        if name in ENTRYWISE and not others and is_alike:
            return self._compute(equation, facts)
        if name == "dot_general" and all(is_cut) and output.size == 1:
            (one, other), _ = equation.params["dimension_numbers"]
            self._join_owners(facts)
            product = entrywise.multiply_constants(*(fact.constant for fact in facts))
            if tuple(one) == tuple(other) and product == 0:
                return EntryFact()
            self._refuse(equation, "returns another number without the removed entries")
        if any(is_cut) or any(map(self.is_cut, equation.outputs)):
            self._refuse(equation, "joins entries, or depends on the shape of an array")
        return EntryFact()

    def _compute(self, equation: Equation, facts: Sequence[EntryFact]) -> EntryFact:
        """Returns the fact of the result of an entrywise operation."""
        rule, constants = ENTRYWISE[equation.name], [x.constant for x in facts]
        is_power = equation.name == "integer_pow" and equation.params["y"] > 0
        is_zero = (rule.keeps_any_zero or is_power) and 0 in constants
        is_zero |= rule.keeps_zeros and not any(x != 0 for x in constants)
        constant = 0.0 if is_zero else entrywise.fold_constant(equation, constants)
        return EntryFact(self._join_owners(facts), constant)

    def _join_owners(self, facts: Sequence[EntryFact]) -> int | None:
        owners = sorted({fact.owner for fact in facts if fact.owner is not None})
        if len(owners) > 1:
            names = " and ".join(repr(self._names[owner]) for owner in owners)
            raise EntriesMeetError(f"entries of {names} meet")
        return owners[0] if owners else None

    def is_cut(self, value: Value) -> bool:
        """Returns whether an array has another shape in the program of what remains."""
        return are_of_other_shape(value.shape, self._kept_shapes.get(value, value.shape))

    def _refuse(self, equation: Equation, text: str) -> NoReturn:
        """Raises an error that names the parameters whose entries an equation reads."""
        owners = {fact.owner for fact in map(self.fact, equation.inputs)}
        names = " and ".join(repr(name) for i, name in enumerate(self._names) if i in owners)
        raise EntriesMeetError(
            f"{equation.name}{names and f' of {names}'}{_locate(equation)} {text}"
        )


def _check_facts(facts: Iterable[EntryFact]) -> None:
    """Raises the error of a fact that has one."""
    for fact in facts:
        if fact.error:
            raise EntriesMeetError(fact.error)


def pair_programs(program: Program, twin: Program) -> Shapes:
    """Returns the shape of each value of a program in the program of what remains.

    Raises:
      EntriesMeetError: the programs differ in more than shapes.
    """
    makers, shapes = program.makers | twin.makers, Shapes()
    partners: dict[Value, Value] = {}

    def match(one: Value, other: Value) -> bool:
        shapes[one] = other.shape
        one, other = find_origin(makers, one), find_origin(makers, other)
        if one.constant is not None and other.constant is not None:
            return one.shape == other.shape and _are_equal(one.constant, other.constant)
        return partners.get(one) is other

    def bind(values: Sequence[Value], others: Sequence[Value]) -> None:
        shapes.update((one, other.shape) for one, other in zip(values, others, strict=True))
        partners.update(zip(values, others, strict=True))

    if len(program.inputs) != len(twin.inputs) or len(program.outputs) != len(twin.outputs):
        raise EntriesMeetError(f"its update {_DEPENDS}")
    bind(program.inputs, twin.inputs)
    steps = [[x for x in each.flat_equations() if not _is_view(x)] for each in (program, twin)]
    for one, other in zip(*steps, strict=False):
        difference = ""
        if one.name != other.name or len(one.inputs) != len(other.inputs):
            difference = _DEPENDS
        elif not all(map(match, one.inputs, other.inputs)):
            difference = "reads a number that depends on the size of the array"
        else:
            bind(one.outputs, other.outputs)
            values = (*one.inputs, *one.outputs)
            is_cut = any(are_of_other_shape(x.shape, shapes[x]) for x in values)
            if _list_settings(one, is_cut) != _list_settings(other, is_cut):
                difference = _DEPENDS
        if difference:
            raise EntriesMeetError(f"{one.name}{_locate(one)} {difference}")
        for bodies in zip(one.inner_programs, other.inner_programs, strict=True):
            shapes |= pair_programs(*bodies)
    if len(steps[0]) != len(steps[1]) or not all(map(match, program.outputs, twin.outputs)):
        raise EntriesMeetError(f"its update {_DEPENDS}")
    return shapes


def find_constant(array: PyTree) -> float | None:
    """Returns the one value of all entries, 0 for no entry, `None` if they differ or are unknown.

    Complex entries are 0 or unknown.
    """
    if not _has_values(array):
        return None
    entries = np.asarray(array).reshape(-1)
    if not entries.any():  # anything holds of no entries
        return 0.0
    is_uniform = (entries == entries[:1]).all()
    return entrywise.find_uniform_value(entries[:1]) if is_uniform else None


def are_of_other_shape(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether arrays differ in shape; a single number may have any number of axes."""
    return shape != other and not math.prod(shape) == math.prod(other) == 1


def find_origin(makers: Mapping[Value, Equation], value: Value) -> Value:
    """Returns the value of which a value is a view."""
    while value in makers and _is_view(makers[value]):
        value = makers[value].inputs[0]
    return value


def _is_view(equation: Equation) -> bool:
    """Returns whether an equation returns its input in order, or repeats a number."""
    if len(equation.inputs) != 1 or len(equation.outputs) != 1:
        return False
    (value,), (output,) = equation.inputs, equation.outputs
    if entrywise.is_copy(equation):
        return bool(value.dtype == output.dtype)
    if equation.name == "broadcast_in_dim":
        return value.size in (1, output.size)
    is_reshape = equation.name == "reshape" and equation.params["dimensions"] is None
    return is_reshape or equation.name == "squeeze"


def _list_settings(equation: Equation, is_cut: bool) -> PyTree:
    """Returns what must be equal in two equations, whose arrays may differ in shape."""
    # As text, because `==` of arrays and programs gives no bool or compares identity.
    skipped = _BODIES | _SHAPES if is_cut else _BODIES
    return {key: repr(x) for key, x in equation.params.items() if key not in skipped}


def _are_equal(one: PyTree, other: PyTree) -> bool:
    """Returns whether two constants have one dtype and value; NaN equals NaN."""
    if one is other:  # numbers that a surrounding program computes have no value yet
        return True
    is_alike = jnp.result_type(one) == jnp.result_type(other)
    return is_alike and all(map(_has_values, (one, other))) and np.array_equal(one, other, True)


def _has_values(array: PyTree) -> bool:
    """Returns whether an array, or a Python number, has numbers already; random keys have none."""
    if array is None or is_traced(array) or isinstance(array, jax.ShapeDtypeStruct):
        return False
    return not jnp.issubdtype(jnp.result_type(array), jax.dtypes.extended)


def _locate(equation: Equation) -> str:
    """Returns ' in NAME' for the transformation of optax that made an equation, '' if unknown."""
    frames = [frame for lines in equation.tracebacks if lines for frame in lines.frames]
    for frame in frames:
        if match := _UPDATE.match(frame.function_name):
            return f" in {match[1]}"
    return ""
