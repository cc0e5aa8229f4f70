"""Fingerprints of programs, functions and objects: the same in every process, or refused.

A function is described by its bytecode, defaults, closure and the globals that it names; an object
by its class and its state. A definition of a library is described by its name and the version.
Addresses, files and lines are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import pathlib
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.programs.program import ClosedJaxpr, Equation, Program, Value, read_jaxpr

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def fingerprint(value: object) -> str:
    """Returns a hash of a value: its type, its state, and the code of its functions.

    Args:
      value: numbers, text, arrays, containers, functions, classes, and objects of these.

    Raises:
      ValueError: a part of the value has no description that another process would share.

    Example:
      >>> scale = lambda factor: lambda x: factor * x
      >>> fingerprint(scale(2)) == fingerprint(scale(2)) != fingerprint(scale(3))
      True
    """
    return _Describer().describe(value)


def fingerprint_program(program: Program) -> str:
    """Returns a hash of a traced program: its equations, their inputs, and its constants.

    Raises:
      ValueError: a parameter of an equation cannot be described; the error names the line in the
        model.
    """
    return _hash(_describe_program(program, {}))


def _hash(parts: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _describe_program(program: Program, numbers: dict[Value, int]) -> Iterator[str]:
    def described(value: Value) -> str:
        if value.constant is not None:
            return fingerprint(value.constant)
        return str(numbers.setdefault(value, len(numbers)))

    for value in program.inputs:
        yield f"input {described(value)} {value.dtype}{value.shape}"
    for equation in program.flat():
        yield f"{equation.name} {[described(value) for value in equation.inputs]}"
        yield from _describe_parameters(equation)
        for body in equation.bodies:
            yield from _describe_program(body, numbers)
        for value in equation.outputs:
            yield f"output {described(value)} {value.dtype}{value.shape}"
    yield f"returns {[described(value) for value in program.outputs]}"


def _describe_parameters(equation: Equation) -> Iterator[str]:
    for name, value in sorted(equation.params.items()):
        if equation.bodies and _is_program(value):
            continue
        try:
            yield f"{name} {fingerprint(value)}"
        except ValueError as error:
            raise ValueError(
                f"{name} of the {equation.name} at {equation.source}: {error}"
            ) from error


def _is_program(value: object) -> bool:
    values = value if isinstance(value, tuple) and value else (value,)
    return all(hasattr(getattr(x, "jaxpr", x), "eqns") for x in values)


class _Describer:
    """Describes values: each object once, an object within itself by its depth."""

    def __init__(self) -> None:
        self._hashes: dict[int, str] = {}
        self._open: dict[int, int] = {}
        self._alive: list[object] = []  # or an identity would be used again

    def describe(self, value: object) -> str:
        """Returns a plain value as text, and a hash of any other."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        key = id(value)
        if key in self._open:
            return f"around {self._open[key]}"
        if key not in self._hashes:
            self._alive.append(value)
            self._open[key] = len(self._open)
            describe = next(
                (describe for kind, describe in _KINDS if isinstance(value, kind)),
                _Describer._object,
            )
            self._hashes[key] = _hash(describe(self, value))
            del self._open[key]
        return self._hashes[key]

    def _array(self, value: chex.Array) -> Iterator[str]:
        if is_traced(value):
            raise ValueError("It is traced, and its value is not known yet.")
        weak = bool(getattr(value, "weak_type", False))
        yield f"array {value.dtype} {value.shape} {weak}"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        yield hashlib.sha256(np.ascontiguousarray(jax.device_get(value)).tobytes()).hexdigest()

    def _sequence(self, value: Sequence[object]) -> Iterator[str]:
        yield self.describe(type(value))
        for item in value:
            yield self.describe(item)

    def _set(self, value: Set[object]) -> Iterator[str]:
        yield f"{_name(type(value))} {sorted(map(self.describe, value))}"

    def _mapping(self, value: Mapping[Hashable, object]) -> Iterator[str]:
        yield self.describe(type(value))
        for key, item in value.items():
            yield self.describe(key)
            yield self.describe(item)

    def _text(self, value: object) -> Iterator[str]:
        text = repr(value)
        if _ADDRESS.search(text):
            raise _no_description(value)
        yield f"{_name(type(value))} {text}"

    def _enum(self, value: enum.Enum) -> Iterator[str]:
        yield f"{_name(type(value))} {value.name}"

    def _pattern(self, value: re.Pattern[str]) -> Iterator[str]:
        yield f"pattern {value.pattern!r} {value.flags}"

    def _logger(self, value: logging.Logger) -> Iterator[str]:
        yield f"logger {value.name}"

    def _partial(self, value: functools.partial[object]) -> Iterator[str]:
        yield "partial"
        yield self.describe((value.func, value.args, value.keywords))

    def _method(self, value: types.MethodType) -> Iterator[str]:
        yield "method"
        yield self.describe((value.__func__, value.__self__))

    def _builtin(self, value: types.BuiltinFunctionType) -> Iterator[str]:
        yield f"builtin {value.__qualname__}"
        yield self.describe(value.__self__)

    def _module(self, value: types.ModuleType) -> Iterator[str]:
        yield f"module {value.__name__} {_version(value.__name__)}"

    def _class(self, value: type) -> Iterator[str]:
        version = _version(value.__module__)
        yield f"class {_name(value)} {version}"
        if version is not None:
            return
        yield self.describe(value.__bases__)
        for name, item in vars(value).items():
            if name not in _IGNORED_IN_CLASSES:
                yield name
                yield self.describe(item)

    def _property(self, value: object) -> Iterator[str]:
        functions = ("fget", "fset", "fdel", "__func__", "func")
        yield f"property {_name(type(value))}"
        yield self.describe([getattr(value, name, None) for name in functions])

    def _function(self, value: types.FunctionType) -> Iterator[str]:
        yield f"function {value.__module__}.{value.__qualname__}"
        version = _version(value.__module__)
        if version is not None:
            yield version
        else:
            yield from self._code(value.__code__)
            yield from self._globals(value)
        yield self.describe((value.__defaults__, value.__kwdefaults__, vars(value)))
        for cell in value.__closure__ or ():
            try:
                yield self.describe(cell.cell_contents)
            except ValueError as error:
                if str(error) != "Cell is empty":
                    raise
                yield "empty"

    def _code(self, code: types.CodeType) -> Iterator[str]:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        table = code.co_exceptiontable.hex()
        yield f"{code.co_code.hex()} {table} {names} {counts} {code.co_flags}"
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield self.describe(constant)

    def _globals(self, value: types.FunctionType) -> Iterator[str]:
        """Describes the globals that a function names, and the names it reads in user modules."""
        names = sorted(_names(value.__code__))
        for name in names:
            if name in value.__globals__:
                yield name
                item = value.__globals__[name]
                yield self.describe(item)
                if isinstance(item, types.ModuleType) and _version(item.__name__) is None:
                    for inner in names:
                        if inner in vars(item):
                            yield self.describe(vars(item)[inner])

    def _program(self, value: ClosedJaxpr) -> Iterator[str]:
        yield from _describe_program(read_jaxpr(value), {})

    def _object(self, value: object) -> Iterator[str]:
        wrapped = getattr(value, "__wrapped__", None)
        if callable(wrapped):  # a jitted or cached function
            yield f"wrapped {_name(type(value))}"
            yield self.describe(wrapped)
        elif type(value) is object:  # a sentinel
            yield "object"
        elif (state := _state(value)) is not None:
            yield "object"
            yield self.describe(type(value))
            yield from self._mapping(state)
        elif hasattr(value, "eqns") or _version(type(value).__module__) is not None:
            yield from self._text(value)
        else:
            raise _no_description(value)


# Attributes of a class that do not change the behaviour of its objects.
_IGNORED_IN_CLASSES = {
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__weakref__",
    "__static_attributes__", "__dataclass_params__", "__dataclass_fields__", "__match_args__",
    "__abstractmethods__", "_abc_impl", "__annotate_func__", "__annotations_cache__",
}  # fmt: skip
_KINDS: list[tuple[Any, Callable[[_Describer, Any], Iterator[str]]]] = [
    (enum.Enum, _Describer._enum),
    ((jax.Array, np.ndarray, np.generic), _Describer._array),
    ((np.dtype, pathlib.PurePath), _Describer._text),
    (ClosedJaxpr, _Describer._program),
    (Set, _Describer._set),
    (Mapping, _Describer._mapping),
    ((tuple, list), _Describer._sequence),
    (re.Pattern, _Describer._pattern),
    (logging.Logger, _Describer._logger),
    (functools.partial, _Describer._partial),
    (types.MethodType, _Describer._method),
    (types.BuiltinFunctionType, _Describer._builtin),
    (types.FunctionType, _Describer._function),
    (types.ModuleType, _Describer._module),
    (type, _Describer._class),
    ((property, classmethod, staticmethod, functools.cached_property), _Describer._property),
]


def _no_description(value: object) -> ValueError:
    return ValueError(
        f"{value!r} of type {_name(type(value))} has no description that another process would "
        "share. Use numbers, text, arrays, functions, dataclasses, or objects of these."
    )


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _version(module: str | None) -> str | None:
    """Returns the version of the library that a module belongs to, `None` for a user's module."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    library = sys.modules.get(root)
    parts = pathlib.PurePath(getattr(library, "__file__", None) or "").parts
    if root == "sparsity" or {"site-packages", "dist-packages"} & {*parts}:
        return str(getattr(library, "__version__", ""))
    return None


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in a function and its inner functions."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return {*code.co_names}.union(*inner)


def _state(value: Any) -> dict[Hashable, object] | None:
    """Returns the attributes of an object without cached ones, `None` if Python sees none."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = {name for each in slots for name in ([each] if isinstance(each, str) else each)}
    names |= {field.name for field in dataclasses.fields(value)} if _has_fields(value) else set()
    names |= vars(value).keys() if hasattr(value, "__dict__") else set()
    if not names and not hasattr(value, "__dict__"):
        return None
    cached = {
        name
        for cls in type(value).__mro__
        for name, item in vars(cls).items()
        if isinstance(item, functools.cached_property)
    }
    named = sorted(names - cached - {"__dict__", "__weakref__"})
    return {name: getattr(value, name) for name in named if hasattr(value, name)}


def _has_fields(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
