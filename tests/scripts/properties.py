"""Masks, moves and whole steps of random trees on two meshes: the bits of one device."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax

import sparsity
from tests import helpers
from tests.properties import strategies as draws
from tests.scripts.devices import Devices

# The devices divide some axes of these, and none of the last.
SHAPES = ((8, 8), (16, 12), (2, 8, 4), (8,), (7, 5))
PATTERNS = ("unstructured", "nm_2,4", "block_2,2", "channel_-1", "fanin_1")
VALUES = 8  # cases of each tree: what a program computes costs little, and its compilation much


def layouts(shape):
    """Returns all ways to divide the axes of a shape among those of the mesh, a of 2 and b of 4."""
    sizes = {None: 1, "a": 2, "b": 4, ("a", "b"): 8}
    specs = [()]
    for size in shape:
        specs = [(*spec, name) for spec in specs for name, n in sizes.items() if size % n == 0]
    names = [[n for name in spec if name for n in name] for spec in specs]
    return [spec for spec, used in zip(specs, names, strict=True) if len(used) == len({*used})]


def place(devices, seed, tree):
    """Returns a tree with each leaf divided in a random way, the same for all values."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        choices = layouts(leaf.shape)
        return devices.put(leaf, *choices[rng.integers(len(choices))])

    return jax.tree.map(one, tree)


def check_meshes(auto, seed, run, cases):
    """Checks that a function returns the same bits for trees on each mesh and on one device.

    A case is the trees of a call. All cases share shapes and dtypes, and so the programs.
    """
    expected = [run(lambda x: x, *trees) for trees in cases]
    for devices in (auto, Devices("Explicit")):
        with jax.set_mesh(devices.mesh):
            for bits, trees in zip(expected, cases, strict=True):
                placed = [place(devices, seed, tree) for tree in trees]
                assert draws.equal_bits(bits, run(devices.put, *placed))


def masks_of_random_trees_are_those_of_one_device(auto):
    @draws.examples(4, VALUES)
    @hypothesis.given(draws.seeds, draws.trees(shapes=SHAPES), draws.sparsities, st.booleans())
    def check(seed, params, target, is_global):
        hypothesis.assume(not is_global or len({x.dtype for x in jax.tree.leaves(params)}) == 1)
        pruner = sparsity.MagnitudePruning(
            sparsity_distribution_fn=draws.everything(target),
            scope=sparsity.Global() if is_global else sparsity.Layerwise(),
        )
        rng = np.random.default_rng(seed)

        def redraw(leaf):
            return draws.values(rng, leaf.shape, leaf.dtype.name)

        def run(put, params):
            return pruner.instant_sparsify(params)

        check_meshes(auto, seed, run, [[jax.tree.map(redraw, params)] for _ in range(VALUES)])

    check()


def steps_of_random_trees_are_those_of_one_device(auto):
    names = [n for n in helpers.list_names(helpers.prunes) if n not in ("top_kast", "admm")]

    @draws.examples(3, VALUES)
    @hypothesis.given(
        draws.seeds,
        st.lists(st.sampled_from(SHAPES[:3]), min_size=1, max_size=3),
        st.sampled_from(names),
        st.sampled_from(PATTERNS),
        st.sampled_from([0.25, 0.5, 0.9]),
    )
    def check(seed, shapes, name, pattern, target):
        options = {"sparsity_type": pattern} if helpers.takes_types(name) else {}
        updater = helpers.make_updater(name, sparsity=target, skip_gradients=False, **options)
        tx = updater.wrap_optax(optax.sgd(0.125))
        update = jax.jit(tx.update)

        def run(put, params, *grads):
            try:
                state = tx.init(params)
            except ValueError as error:  # of SRigL
                assert "keeps a weight of every neuron" in str(error)  # noqa: PT017
                return None
            # Steps return scalars on the mesh: one program serves the first step and the others.
            state = jax.tree.map(lambda x: x if x.ndim else put(x), state)
            for grad in grads:
                updates, state = update(grad, state, params)
                params = optax.apply_updates(params, updates)
            return params, sparsity.get_sparse_state(state).masks

        rng = np.random.default_rng(seed)

        def draw_tree():
            return [
                {"w": draws.finite(rng, shape), "b": draws.finite(rng, shape[-1:])}
                for shape in shapes
            ]

        check_meshes(auto, seed, run, [[draw_tree() for _ in range(5)] for _ in range(VALUES)])

    check()


CASES = {  # these put trees on axes of both kinds
    "Auto": [
        masks_of_random_trees_are_those_of_one_device,
        steps_of_random_trees_are_those_of_one_device,
    ]
}
