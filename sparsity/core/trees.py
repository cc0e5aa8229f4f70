"""Trees by path: names leaves, matches two trees leaf by leaf, finds nodes in nested states.

Parameters may be any pytree, and a mask tree, a gradient tree or an optimizer state need not have
the same treedef as the parameters: a subtree may be `None` or `optax.MaskedNode`, and flax's nnx
wraps leaves in variables at `init` but not at `update`. So leaves meet by *path*: a tuple of
`jax.tree_util` key entries (compared as entries, so that the key `'mu'` of a dictionary is not the
field `.mu` of Adam's state), without the entry of an nnx variable's value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

N = TypeVar("N", bound=NamedTuple)
# A tree of arrays in any containers, those of users included. No type says this: flax's FrozenDict,
# nnx.State, equinox modules and dataclasses share no base class. jax has Any, too.
PyTree: TypeAlias = Any
# Type of a user's tree, where a tree of the same containers returns. Arrays of numpy may return as
# arrays of jax, which the type does not say.
AnyArray = TypeVar("AnyArray", jax.Array, np.ndarray)
Tree = TypeVar("Tree")
# Trees by their leaves; trees that go with params may have `None` in the place of a parameter.
Params: TypeAlias = PyTree  # arrays of a model, and leaves that are no arrays
Grads: TypeAlias = PyTree  # arrays in the shapes of the parameters
Masks: TypeAlias = PyTree  # uint8, 1 for kept weights, or packed bits; `None` for a dense parameter
Sparsities: TypeAlias = PyTree  # numbers, the fraction removed; `None` for a dense parameter
ScoreTree: TypeAlias = PyTree  # arrays in the shapes of the parameters
KeyPath: TypeAlias = tuple[Hashable, ...]  # of jax's key entries
Path: TypeAlias = tuple[str, ...]  # the same as users see it, see `path_names`


def leaves_by_path(tree: PyTree) -> dict[KeyPath, PyTree]:
    """Returns `{key_path: leaf}` in tree order; `None` and other empty nodes have no leaf.

    Raises:
      ValueError: a node of the user gives two children one key. The message names the path.

    Example:
      >>> [path_string(path) for path in leaves_by_path({"a": [1.0, None], "b": 2.0})]
      ['a/0', 'b']
    """
    pairs = _flatten(tree)[0]
    by_path = dict(pairs)
    if len(by_path) < len(pairs):
        paths = [key_path for key_path, _ in pairs]
        name = next(path_string(key_path) for key_path in paths if paths.count(key_path) > 1)
        raise ValueError(
            f"Two leaves have the path {name!r}, and leaves are told apart by path alone. Give "
            "each child a key of its own in tree_flatten_with_keys."
        )
    return by_path


def leaves_by_names(tree: PyTree) -> dict[Path, PyTree]:
    """Returns `leaves_by_path` by the paths that users see, see `path_names`.

    Example:
      >>> leaves_by_names({"a": [1.0, None], "b": 2.0})
      {('a', '0'): 1.0, ('b',): 2.0}
    """
    return {path_names(key_path): leaf for key_path, leaf in leaves_by_path(tree).items()}


def leaves_and_none(tree: PyTree) -> dict[KeyPath, PyTree]:
    """Returns `leaves_by_path` with an entry for each `None`."""
    return dict(_flatten(tree, is_leaf=lambda node: node is None)[0])


def covered_paths(tree: PyTree) -> set[KeyPath]:
    """Returns the paths of leaves and of placeholders for subtrees: `None`, `MaskedNode`."""
    return {key_path for key_path, _ in _flatten(tree, is_leaf=_is_placeholder)[0]}


def node_paths(tree: PyTree) -> set[KeyPath]:
    """Returns the paths of all nodes: leaves, containers and placeholders.

    Example:
      >>> sorted(path_string(path) for path in node_paths({"a": [1.0, None], "b": {}}))
      ['a', 'a/0', 'a/1', 'b', 'params']
    """
    ends = _flatten(tree, is_leaf=lambda node: not children(node))[0]
    return {key_path[:end] for key_path, _ in ends for end in range(len(key_path) + 1)}


def path_names(key_path: KeyPath) -> Path:
    """Returns the path as users see it: a string a key, index or attribute; `()` at the root."""
    return tuple(_entry_name(entry) for entry in key_path)


def path_string(key_path: KeyPath) -> str:
    """Returns the path joined by '/', for messages and tables; 'params' at the root."""
    return join_names(path_names(key_path))


def join_names(names: Sequence[str]) -> str:
    """Returns names joined by '/'; 'params' for none."""
    return "/".join(names) or "params"


def map_matched(
    fn: Callable[..., object],
    tree: PyTree,
    *others: PyTree,
    role: str = "params",
    others_role: str = "masks (or scores or sparsities) that go with them",
) -> PyTree:
    """Maps `fn(key_path, leaf, *other_leaves)` over `tree`; leaves of `others` are found by path.

    Args:
      fn: its first argument is the key path, its last ones are the leaves of `others` at the same
        path, or `None` where such a tree has none.
      tree: gives the structure of the result.
      *others: trees whose leaves all occur in `tree`, in whatever containers.
      role: what `tree` is, for the message.
      others_role: what `others` are.

    Raises:
      ValueError: a tree of `others` has leaves at paths where `tree` has none; the paths are named.

    Example:
      >>> scale = lambda key_path, leaf, factor: leaf if factor is None else leaf * factor
      >>> map_matched(scale, {"a": 2.0, "b": 3.0}, {"a": 10.0, "b": None})
      {'a': 20.0, 'b': 3.0}
    """
    pairs, treedef = _flatten(tree)
    leaves, lookups = dict(pairs), [leaves_by_path(other) for other in others]
    for lookup in lookups:
        check_paths(leaves, lookup, role, others_role)
    mapped = [fn(key_path, leaf, *(x.get(key_path) for x in lookups)) for key_path, leaf in pairs]
    return jax.tree.unflatten(treedef, mapped)


def check_paths(
    leaves: Collection[KeyPath], others: Collection[KeyPath], role: str, others_role: str
) -> None:
    """Raises a ValueError that names the paths of `others` that `leaves` lacks."""
    if missing := [key_path for key_path in others if key_path not in leaves]:
        remedy = "Both must be made for the same model."
        if any(is_within(key_path[:-1], leaves) for key_path in missing):
            remedy = "Give an array in place of a list or a dict, whose entries are leaves."
        raise ValueError(
            f"The {role} have no leaf at {listed(list(map(path_string, missing)))}, which the "
            f"{others_role} have. The {role} have: {listed(list(map(path_string, leaves)))}. "
            f"{remedy}"
        )


def is_within(key_path: KeyPath, paths: Collection[KeyPath]) -> bool:
    """Returns whether the path, or one that leads to it, is among the paths."""
    return any(key_path[:end] in paths for end in range(len(key_path), -1, -1))


def is_prunable(leaf: object) -> bool:
    """Returns whether a leaf can have a mask: a floating or complex array, with a zero."""
    dtype: PyTree = getattr(leaf, "dtype", None)
    if not is_array(leaf) or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return bool(dtype != jnp.float8_e8m0fnu)  # powers of two, the scales of other arrays


def prunable(tree: PyTree, like: PyTree | None = None) -> PyTree:
    """Returns the tree with `None` for leaves that can never have a mask.

    These are random keys, integers and functions; hooks that map over all leaves never see one.

    Args:
      tree: any tree.
      like: tree of the same paths whose leaves decide; by default `tree` itself.
    """
    deciding = leaves_by_path(tree if like is None else like)
    unprunable = {key_path for key_path, leaf in deciding.items() if not is_prunable(leaf)}
    if not unprunable:
        return tree
    return map_matched(lambda key_path, leaf: None if key_path in unprunable else leaf, tree)


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array, or stands for one by shape and dtype."""
    return hasattr(leaf, "dtype") and isinstance(getattr(leaf, "shape", None), tuple)


def is_numeric(leaf: object) -> bool:
    """Returns whether a leaf is an array of numbers or booleans: no random keys, no text."""
    dtype: PyTree = getattr(leaf, "dtype", None)
    return is_array(leaf) and any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def only_arrays(tree: PyTree) -> PyTree:
    """Returns the tree with `None` for leaves that are no arrays."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def split_arrays(tree: PyTree) -> tuple[list[PyTree], Callable[[Sequence[object]], PyTree]]:
    """Returns the arrays of a tree, and a function that puts others in their places.

    Example:
      >>> arrays, rebuild = split_arrays({"w": jnp.ones(2), "name": "relu"})
      >>> rebuild([len(arrays)])
      {'name': 'relu', 'w': 1}
    """
    leaves, treedef = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: Sequence[object]) -> PyTree:
        filled = list(leaves)
        for i, array in zip(indices, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[i] for i in indices], rebuild


def are_alike(one: PyTree, other: PyTree) -> bool:
    """Returns whether two abstract trees have one structure, and leaves of equal type and value.

    A program that was traced with 1 differs from one with 1.0 or True.

    Example:
      >>> are_alike({"train": True}, {"train": 1})
      False
    """
    structures: list[PyTree] = [jax.tree.structure(tree) for tree in (one, other)]
    if structures[0] != structures[1]:
        return False
    return all(
        type(x) is type(y) and (repr(x) == repr(y) if isinstance(x, float | complex) else x == y)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def find_nodes(tree: PyTree, node_class: type[N]) -> list[tuple[KeyPath, N]]:
    """Returns all nodes of the NamedTuple `node_class` with their paths, nested ones included."""
    nodes: list[tuple[KeyPath, N]] = []
    for key_path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, node_class)
    ):
        if isinstance(node, node_class):
            nodes.append((key_path, node))
            for field, child in zip(node._fields, node, strict=True):
                nodes += [
                    ((*key_path, GetAttrKey(field), *subpath), inner_node)
                    for subpath, inner_node in find_nodes(child, node_class)
                ]
    return nodes


def replace_node(tree: Tree, node: PyTree, replacement: PyTree) -> Tree:
    """Replaces a node of a tree."""
    return jax.tree.map(
        lambda x: replacement if x is node else x, tree, is_leaf=lambda x: x is node
    )


def strip_variables(tree: Tree) -> Tree:
    """Returns the tree with the values of nnx's variables in place of the variables.

    `nnx.Optimizer` keeps its state in variables of another class than those of the parameters, and
    takes both apart before each update.
    """
    return jax.tree.map(
        lambda node: children(node)[0][1] if _is_variable(node) else node,
        tree,
        is_leaf=_is_variable,
    )


def children(node: PyTree) -> list[tuple[KeyPath, PyTree]]:
    """Returns the nodes one level below, with their paths; those of a variable are its value's."""
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda child: child is not node)
    is_value = _is_variable(node)
    return [(() if is_value else key_path, child) for key_path, child in below if key_path]


def shape_text(shape: Sequence[int]) -> str:
    """Returns a shape as text for a table.

    Example:
      >>> shape_text((3, 4)), shape_text(())
      ('3x4', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"


def listed(names: list[str], most: int = 8) -> str:
    """Joins names for a message, the first few of many."""
    shown = ", ".join(repr(name) for name in names[:most])
    return (shown or "nothing") + (f" and {len(names) - most} more" if len(names) > most else "")


def list_paths(paths: Iterable[KeyPath]) -> str:
    """Joins the names of paths for a message, in order."""
    return listed(sorted(map(path_string, paths)))


def _flatten(
    tree: PyTree, is_leaf: Callable[[object], bool] | None = None
) -> tuple[list[tuple[KeyPath, PyTree]], PyTree]:
    """Returns paths with leaves, without the entries of variables, and the treedef."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    if _find_variable_class() is None:
        return pairs, treedef
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
    variables = {key_path for key_path, node in nodes if _is_variable(node)}

    def drop_value_entries(key_path: KeyPath) -> KeyPath:
        return tuple(x for end, x in enumerate(key_path) if key_path[:end] not in variables)

    if not variables:
        return pairs, treedef
    return [(drop_value_entries(key_path), leaf) for key_path, leaf in pairs], treedef


def _find_variable_class() -> type | None:
    """Returns the class of nnx's variables, `None` if nnx is not imported."""
    return getattr(sys.modules.get("flax.nnx"), "Variable", None)


def _is_variable(node: object) -> bool:
    variable_class = _find_variable_class()
    return variable_class is not None and isinstance(node, variable_class)


def _is_placeholder(node: object) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _entry_name(entry: object) -> str:
    match entry:
        case DictKey() | FlattenedIndexKey():
            return str(entry.key)
        case GetAttrKey():
            return str(entry.name)
        case SequenceKey():
            return str(entry.idx)
    return str(entry)
