"""Relations of layout primitives, against arrays that hold the place of each of their entries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparsity.programs.layout import LAYOUTS
from sparsity.programs.program import read_jaxpr
from tests.graph.every_primitive import IN_SOME_VERSIONS

_GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))


_SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def as_index(x):
    return jnp.abs(10 * x).astype(int) % 4


def add_twice(one, other):
    return one[0] + other[0], one[1] + 2 * other[1]


# Functions of one primitive, and the shapes of their inputs.
CASES = {
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4, 5), (1, 3)), [(3, 1)]),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [(2, 3), (2, 4)]),
    "cumsum": (lambda x: lax.cumsum(x, 1), [(2, 3)]),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 3)), [(4, 3)]),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)),
        [(4, 3), (2, 3)],
    ),
    "gather": (lambda x: lax.gather(x, np.array([[2], [0]]), _GATHER, (1, 3)), [(4, 3)]),
    "pad": (lambda x: lax.pad(x, 1.0, [(1, -1, 1), (0, 0, 0)]), [(4, 3)]),
    "reduce_window": (
        lambda x, y: lax.reduce_window((x, y), (0.0, 0.0), add_twice, (1, 2), (1, 1), "SAME"),
        [(2, 3), (2, 3)],
    ),
    "reduce_window_max": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 1), "VALID"),
        [(2, 3)],
    ),
    "reshape": (lambda x: lax.reshape(x, (4, 1, 3, 5)), [(2, 2, 15)]),
    "reshape in an order": (lambda x: lax.reshape(x, (3, 2, 4), (2, 0, 1)), [(2, 4, 3)]),
    "rev": (lambda x: lax.rev(x, (1,)), [(2, 3)]),
    "scatter": (lambda x, i, y: lax.scatter(x, as_index(i), y, _SCATTER), [(4, 3), (2, 1), (2, 3)]),
    "scatter of parts": (
        lambda x, i, y: lax.scatter(x, as_index(i), y, _SCATTER),
        [(4, 3), (2, 1), (2, 2)],
    ),
    "scatter-add": (
        lambda x, i, y: lax.scatter_add(x, as_index(i), y, _SCATTER),
        [(4, 3), (2, 1), (2, 3)],
    ),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 2)), [(2, 4, 5)]),
    "sort": (lambda x, y, z: lax.sort((x, y, z), 1, num_keys=2), [(2, 3)] * 3),
    "split": (lambda x: lax.split(x, (1, 2, 3), 1), [(2, 6)]),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), [(1, 2, 1, 3)]),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [(2, 3), (2, 3)]),
    "tile": (lambda x: jnp.tile(x, (3, 1)), [(2, 4)]),
    "top_k": (lambda x: lax.top_k(x, 2), [(4, 3)]),
    "top_k of all": (lambda x: lax.top_k(x, 4, axis=0), [(4, 3)]),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [(2, 3, 4)]),
    "unstack": (lambda x: jnp.unstack(x, axis=1), [(2, 3, 4)]),
}


def list_numbers(kind, places, shapes):
    """{place: numbers of its entries} of places that are combined, or follow one another."""
    sizes = [x if isinstance(x, int) else shapes[x.array][x.axis] for x in places]
    if kind == "sum":
        ends = np.cumsum([0, *sizes])
        numbers = [np.arange(start, end)[:, None] for start, end in itertools.pairwise(ends)]
    else:  # of each entry the combinations that hold it
        grids = [grid.reshape(-1) for grid in np.indices(sizes)]
        numbers = [
            [np.flatnonzero(grid == i) for i in range(n)]
            for grid, n in zip(grids, sizes, strict=True)
        ]
    pairs = zip(places, numbers, strict=True)
    return {place: number for place, number in pairs if not isinstance(place, int)}


def find_changed(before, after, axis):
    """The indices along an axis at which arrays differ."""
    differs = np.moveaxis(np.not_equal(before, after), axis, 0)
    return np.flatnonzero(differs.reshape(len(differs), -1).any(1))


def check(relation, fn, arrays):
    """Changes the entries of each source; only entries of targets of the same number change."""
    before = jax.tree.leaves(fn(*arrays))
    sources = list_numbers(relation.kind, relation.sources, [x.shape for x in arrays])
    targets = list_numbers(relation.kind, relation.targets, [x.shape for x in before])
    for source, numbers in sources.items():
        for index, each in enumerate(numbers):
            inputs = [x.copy() for x in arrays]
            np.moveaxis(inputs[source.array], source.axis, 0)[index] *= -0.7
            after = jax.tree.leaves(fn(*inputs))
            for target, places in targets.items():
                one, other = before[target.array], after[target.array]
                for changed in find_changed(one, other, target.axis):
                    assert {*each} & {*places[changed]}, (relation, index, changed)


# Some versions of jax have no primitive of this name.
NAMES = [x for x in CASES if x not in IN_SOME_VERSIONS or hasattr(lax, f"{x}_p")]


@pytest.mark.parametrize("name", NAMES)
def test_related_axes_hold_the_same_entries_and_no_axis_is_left_out(name):
    fn, shapes = CASES[name]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in shapes]
    (equation,) = [
        x
        for x in read_jaxpr(jax.make_jaxpr(fn)(*arrays)).flat_equations()
        if x.name == name.split()[0]
    ]
    relations = LAYOUTS[equation.name].relate(equation)
    sources, targets = (
        {place for places in each for place in places if not isinstance(place, int)}
        for each in ([x.sources for x in relations], [x.targets for x in relations])
    )
    for index, shape in enumerate(shapes):
        assert {(index, axis) for axis, size in enumerate(shape) if size > 1} <= sources
    assert all(axis < len(equation.outputs[index].shape) for index, axis in targets)
    for relation in relations:
        if relation.may_lose_entries:
            check(relation, jax.jit(fn), arrays)
