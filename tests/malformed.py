"""Descriptions in JSON that lie: a field replaced, left out, or repeated under another name."""

import copy
import math

FIELDS = (
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**63, 2**64 - 1, 1.5, math.nan, math.inf, 1e308, "",
    "w", "float32", "int8", "object", "V4", "S3", "F32", "<f4", "bfloat16", "../w", [], {}, [1],
    [[3, 4]], [0, 2**62], {"w": 1},
)  # fmt: skip


def places(tree, at=()):
    """Yields the keys that lead to each node of nested dicts and lists, but the root."""
    if at:
        yield at
    children = enumerate(tree) if isinstance(tree, list) else ()
    for key, child in tree.items() if isinstance(tree, dict) else children:
        yield from places(child, (*at, key))


def lie(rng, tree, times=2):
    """Returns a copy of nested dicts and lists with at most so many lies."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.integers(1, times + 1)):
        nodes = [*places(tree)]
        if not nodes:
            break
        *path, key = nodes[rng.integers(len(nodes))]
        node = tree
        for step in path:
            node = node[step]
        match rng.integers(5):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[str(rng.choice([*node, "w", "zz"]))] = node[key]
            case 1:
                node.append(node[key])
            case _:
                node[key] = copy.deepcopy(FIELDS[rng.integers(len(FIELDS))])
    return tree
