"""Fingerprints of programs, functions and objects: the same in every process, or refused.

A function is described by its bytecode, defaults, closure and the globals that it names; an object
by its class and its state. A definition of a library is described by its name and the version.
Addresses, files and lines are left out.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import logging
import pathlib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Set

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.programs.program import ClosedJaxpr, Equation, Jaxpr, Program, Value, read_jaxpr

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def fingerprint(value: object) -> str:
    """Returns a hash of a value: its type, its state, and the code of its functions.

    Args:
      value: numbers, text, arrays, containers, functions, classes, and objects of these; and
        traced programs, with their equations, inputs and constants.

    Raises:
      ValueError: a part of the value has no description that another process would share; of a
        program, the error names the line in the model.

    Example:
      >>> scale = lambda factor: lambda x: factor * x
      >>> fingerprint(scale(2)) == fingerprint(scale(2)) != fingerprint(scale(3))
      True
    """
    return _Describer().describe(value)


def _describe_program(program: Program, index_by_value: dict[Value, int]) -> Iterator[str]:
    def describe_value(value: Value) -> str:
        if value.constant is not None:
            return fingerprint(value.constant)
        return str(index_by_value.setdefault(value, len(index_by_value)))

    for value in program.inputs:
        yield f"input {describe_value(value)} {value.dtype}{value.shape}"
    for equation in program.flat_equations():
        yield f"{equation.name} {[describe_value(value) for value in equation.inputs]}"
        yield from _describe_parameters(equation)
        for body in equation.inner_programs:
            yield from _describe_program(body, index_by_value)
        for value in equation.outputs:
            yield f"output {describe_value(value)} {value.dtype}{value.shape}"
    yield f"returns {[describe_value(value) for value in program.outputs]}"


def _describe_parameters(equation: Equation) -> Iterator[str]:
    for name, value in sorted(equation.params.items()):
        if equation.inner_programs and _is_program(value):
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
        # By identity: the value, or its identity would be used again, and its hash.
        self._hashes: dict[int, tuple[object, str]] = {}
        self._open: dict[int, int] = {}

    def describe(self, value: object) -> str:
        """Returns a plain value as text, and a hash of any other."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        key = id(value)
        if key in self._open:
            return f"around {self._open[key]}"
        if key not in self._hashes:
            self._open[key] = len(self._open)
            digest = hashlib.sha256()
            for part in map(self.describe, self._list_parts(value)):
                digest.update(f"{len(part)}:{part}".encode())
            self._hashes[key] = value, digest.hexdigest()
            del self._open[key]
        return self._hashes[key][1]

    def _list_parts(self, value: object) -> Iterable[object]:
        """Returns the name of a kind of values, and all that a value of this kind consists of."""
        match value:
            case enum.Enum():
                return "enum", _qualify_name(type(value)), value.name
            case np.ma.MaskedArray():
                return "masked", np.ma.getdata(value), np.ma.getmaskarray(value)
            case jax.Array() | np.ndarray() | np.generic():
                return "array", *_describe_array(value)
            case pathlib.PurePath():
                return "text", *_describe_text(value)
            case ClosedJaxpr() | Jaxpr():
                return "program", *_describe_program(read_jaxpr(value), {})
            case Program():
                return "program", *_describe_program(value, {})
            case Set():
                return "set", _qualify_name(type(value)), sorted(map(self.describe, value))
            case Mapping():
                return "mapping", type(value), *itertools.chain.from_iterable(value.items())
            case tuple() | list():
                return "sequence", type(value), *value
            case re.Pattern():
                return "pattern", value.pattern, int(value.flags)
            case logging.Logger():
                return "logger", value.name
            case functools.partial():
                return "partial", value.func, value.args, value.keywords
            case types.MethodType():
                return "method", value.__func__, value.__self__
            case types.BuiltinFunctionType():
                return "builtin", value.__qualname__, value.__self__
            case types.FunctionType():
                return "function", *_describe_function(value)
            case types.CodeType():
                return "code", *(getattr(value, name) for name in _CODE)
            case types.ModuleType():
                return "module", value.__name__, _find_version(value.__name__)
            case type():
                return "class", *_describe_class(value)
            case property():
                return "property", type(value), value.fget, value.fset, value.fdel
            case functools.cached_property():
                return "cached property", type(value), value.func
            case _:
                return _describe_object(value)


_CODE = (
    "co_code", "co_exceptiontable", "co_consts", "co_names", "co_varnames", "co_freevars",
    "co_cellvars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags",
)  # fmt: skip
# Attributes of a class that do not change the behaviour of its objects.
_IGNORED_IN_CLASSES = {
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__weakref__",
    "__static_attributes__", "__dataclass_params__", "__dataclass_fields__", "__match_args__",
    "__abstractmethods__", "_abc_impl", "__annotate_func__", "__annotations_cache__",
}  # fmt: skip


def _describe_array(value: jax.Array | np.ndarray | np.generic) -> Iterator[object]:
    if is_traced(value):
        raise ValueError("It is traced, and its value is not known yet.")
    yield from (str(value.dtype), value.shape, bool(getattr(value, "weak_type", False)))
    if not isinstance(value, jax.Array) and value.dtype.hasobject:
        yield value.tolist()  # the bytes are addresses
        return
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    yield hashlib.sha256(np.ascontiguousarray(jax.device_get(value)).tobytes()).hexdigest()


def _describe_text(value: object) -> Iterator[object]:
    text = repr(value)
    if _ADDRESS.search(text):
        raise _make_refusal(value)
    yield from (_qualify_name(type(value)), text)


def _describe_class(value: type) -> Iterator[object]:
    version = _find_version(value.__module__)
    yield from (_qualify_name(value), version)
    if version is None:
        yield value.__bases__
        for name, member in vars(value).items():
            if name not in _IGNORED_IN_CLASSES:
                yield from (name, member)


def _describe_function(value: types.FunctionType) -> Iterator[object]:
    version = _find_version(value.__module__)
    yield from (f"{value.__module__}.{value.__qualname__}", version)
    if version is None:
        yield value.__code__
        yield from _describe_globals(value)
    yield from (value.__defaults__, value.__kwdefaults__, vars(value))
    for cell in value.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "empty cell"


def _describe_globals(value: types.FunctionType) -> Iterator[object]:
    """Yields the globals that a function names, and values that it reads in user modules."""
    names = sorted(_list_names(value.__code__))
    for name in names:
        if name in value.__globals__:
            used = value.__globals__[name]
            yield from (name, used)
            if isinstance(used, types.ModuleType) and _find_version(used.__name__) is None:
                yield from (vars(used)[inner] for inner in names if inner in vars(used))


def _describe_object(value: object) -> Iterator[object]:
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):  # a jitted or cached function
        yield from ("wrapped", _qualify_name(type(value)), wrapped)
    elif type(value) is object:
        yield "sentinel"
    elif (state := _read_attributes(value)) is not None:
        yield from ("object", type(value), state)
    elif _find_version(type(value).__module__) is not None:
        yield from ("text", *_describe_text(value))
    else:
        raise _make_refusal(value)


def _make_refusal(value: object) -> ValueError:
    return ValueError(
        f"{value!r} of type {_qualify_name(type(value))} has no description that another process "
        "would share. Use numbers, text, arrays, functions, dataclasses, or objects of these."
    )


def _qualify_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _find_version(module: str | None) -> str | None:
    """Returns the version of the library that a module belongs to, `None` for a user's module."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    library = sys.modules.get(root)
    parts = pathlib.PurePath(getattr(library, "__file__", None) or "").parts
    if root == "sparsity" or {"site-packages", "dist-packages"} & {*parts}:
        return str(getattr(library, "__version__", ""))
    return None


def _list_names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in a function and its inner functions."""
    inner = (_list_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return {*code.co_names}.union(*inner)


def _read_attributes(value: object) -> dict[str, object] | None:
    """Returns the attributes of an object without cached ones, `None` if Python sees none."""
    classes = type(value).__mro__
    slots = [vars(cls).get("__slots__", ()) for cls in classes]
    names = {name for each in slots for name in ([each] if isinstance(each, str) else each)}
    if not names and not hasattr(value, "__dict__"):
        return None
    members = [pair for cls in classes for pair in vars(cls).items()]
    cached = {name for name, member in members if isinstance(member, functools.cached_property)}
    names = (names | getattr(value, "__dict__", {}).keys()) - cached - {"__dict__", "__weakref__"}
    return {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}
