"""Masks, moves and whole steps of random trees on a mesh: the bits of one device."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax

import sparsity
from tests import helpers
from tests.properties import strategies as draws

# The devices divide some axes of these, and none of the last.
SHAPES = ((8, 8), (16, 12), (2, 8, 4), (8,), (7, 5))
PATTERNS = ("unstructured", "nm_2,4", "block_2,2", "channel_-1", "fanin_1")


def layouts(shape):
    """Returns all ways to divide the axes of a shape among those of the mesh, a of 2 and b of 4."""
    sizes = {None: 1, "a": 2, "b": 4, ("a", "b"): 8}
    specs = [()]
    for size in shape:
        specs = [(*spec, name) for spec in specs for name, n in sizes.items() if size % n == 0]
    names = [[n for name in spec if name for n in name] for spec in specs]
    return [spec for spec, used in zip(specs, names, strict=True) if len(used) == len({*used})]


def place(devices, rng, tree):
    """Returns a tree with each leaf divided in a random way."""

    def one(leaf):

        choices = layouts(leaf.shape)
        return devices.put(leaf, *choices[rng.integers(len(choices))])

    return jax.tree.map(one, tree)


def masks_of_random_trees_are_those_of_one_device(devices):
    @draws.examples(6)
    @hypothesis.given(draws.seeds, draws.trees(shapes=SHAPES), draws.sparsities, st.booleans())
    def check(seed, params, target, is_global):
        hypothesis.assume(not is_global or len({x.dtype for x in jax.tree.leaves(params)}) == 1)
        pruner = sparsity.MagnitudePruning(
            sparsity_distribution_fn=draws.everything(target),
            scope=sparsity.Global() if is_global else sparsity.Layerwise(),
        )
        sharded = place(devices, np.random.default_rng(seed), params)
        expected = pruner.instant_sparsify(params)
        with jax.set_mesh(devices.mesh):
            assert draws.equal_bits(expected, pruner.instant_sparsify(sharded))

    check()


def steps_of_random_trees_are_those_of_one_device(devices):
    names = [n for n in helpers.names_of(helpers.prunes) if n not in ("top_kast", "admm")]

    @draws.examples(4)
    @hypothesis.given(
        draws.seeds,
        st.sampled_from(SHAPES[:3]),
        st.sampled_from(names),
        st.sampled_from(PATTERNS),
        st.sampled_from([0.25, 0.5, 0.9]),
    )
    def check(seed, shape, name, pattern, target):
        options = {"sparsity_type": pattern} if helpers.takes_types(name) else {}
        updater = helpers.make_updater(name, sparsity=target, skip_gradients=False, **options)
        tx = updater.wrap_optax(optax.sgd(0.125))

        def run(params, grads):
            try:
                state = tx.init(params)
            except ValueError as error:  # of SRigL
                assert "keeps a weight of every neuron" in str(error)  # noqa: PT017
                return None
            update = jax.jit(tx.update)
            for grad in grads:
                updates, state = update(grad, state, params)
                params = optax.apply_updates(params, updates)
            return params, sparsity.get_sparse_state(state).masks

        rng = np.random.default_rng(seed)
        params, *grads = [
            {"w": draws.finite(rng, shape), "b": draws.finite(rng, shape[-1:])} for _ in range(5)
        ]
        expected = run(params, grads)
        placed = place(devices, rng, params)
        placements = jax.tree.map(lambda x: x.sharding, placed)
        with jax.set_mesh(devices.mesh):
            computed = run(placed, [jax.device_put(grad, placements) for grad in grads])
        assert (expected is None) == (computed is None)
        if expected is not None:
            assert draws.equal_bits(expected, computed)

    check()


_BOTH = [
    masks_of_random_trees_are_those_of_one_device,
    steps_of_random_trees_are_those_of_one_device,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
