"""Whole updates on eight virtual devices, in processes of their own: masks, placement, memory."""

import pytest

import sparsity
from tests.eight_devices import run

_SETUP = """
import contextlib, functools, optax, sparsity
from sparsity import sparsity_distributions

EXPLICIT = KIND == AxisType.Explicit
SPECS = {  # of the kernels of two layers and of the bias
    "data parallel": (P(), P(), P()),
    "fsdp": (P(("a", "b")), P(("a", "b")), P(("a", "b"))),
    "tensor parallel": (P(None, "b"), P("b", None), P("b")),
    "both": (P("a", "b"), P("b", "a"), P("b")),
}

def tree(seed, rows=16, columns=64):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {"in": {"kernel": draw(rows, columns), "bias": draw(columns)},
            "out": {"kernel": draw(columns, rows)}}

def place(values, layout):
    first, second, bias = SPECS[layout]
    specs = {"in": {"kernel": first, "bias": bias}, "out": {"kernel": second}}
    return jax.tree.map(lambda x, spec: put(x, *spec), values, specs)

def make(name, **options):
    return sparsity.create_updater_from_config(
        {"algorithm": name, "sparsity": 0.75, "update_freq": 2, "update_start_step": 1,
         "update_end_step": 4} | options)

def on(layout):
    return jax.set_mesh(MESH) if layout else contextlib.nullcontext()
"""


def run_on_mesh(kind, body):
    run(kind, _SETUP + body)


_NAMES = sparsity.all_algorithm_names()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("names", [_NAMES[start::3] for start in range(3)], ids=" ".join)
def test_every_algorithm_gives_bit_equal_masks_on_every_mesh(kind, names):
    run_on_mesh(
        kind,
        f"NAMES = {names}"
        """
for name in NAMES:
    # One layer is enough where each is ranked by itself.
    alone = {} if name.startswith("global") else {"custom_sparsity_map": {"out/kernel": None}}
    updater = make(name, **alone)
    masks = {}
    for layout in (None, "both"):
        here = (lambda x: x) if layout is None else functools.partial(place, layout=layout)
        with on(layout):
            p, g = (jax.tree.map(jnp.asarray, here(tree(seed))) for seed in (0, 1))
            state = updater.init_state(p)._replace(count=jnp.int32(4))
            if name.endswith("ste"):
                masks[layout] = jax.tree.map(lambda w: w != 0, updater.pre_forward_update(p, state))
            else:
                masks[layout] = updater.update_state(state, p, g).masks
            for mask, like in zip(jax.tree.leaves(masks[layout]), [p["in"], p["out"]]):
                if layout and not name.endswith("ste"):
                    like = like["kernel"]
                    assert mask.sharding.is_equivalent_to(like.sharding, 2), (name, layout, mask)
    jax.tree.map(np.testing.assert_array_equal, masks["both"], masks[None])
""",
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_run_on_a_mesh_agrees_with_one_device_compiles_once_and_keeps_its_placement(kind):
    run_on_mesh(
        kind,
        """
def loss(params, x, y):
    if EXPLICIT:  # where a product would have to name its sharding
        losses = jax.tree.map(lambda w, t: jnp.sum((jnp.tanh(w) - t) ** 2), params, y)
        return sum(jax.tree.leaves(losses))
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] - y) ** 2)

def train(layout, x, y):
    params = place(tree(0), layout) if layout else jax.tree.map(jnp.asarray, tree(0))
    updater = make("rigl", use_packed_masks=True, custom_sparsity_map={"out/kernel": None})
    # With a smaller eps regrown weights would all move equally far, and tie in the next update.
    tx = updater.wrap_optax(optax.adam(0.05, eps=0.05))
    shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
    own = jax.tree.map(lambda leaf: leaf.sharding, params)

    @functools.partial(jax.jit, out_shardings=(own, shardings))
    def step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init, out_shardings=shardings)(params)
    for _ in range(5):
        params, state = step(params, state, x, y)
    assert not layout or step._cache_size() == 1
    if layout:  # the bytes divide as the entries do
        mask, like = state.masks["in"]["kernel"], params["in"]["kernel"]
        assert mask.sharding.is_equivalent_to(like.sharding, 2), (layout, mask.sharding)
    return params, jax.tree.map(np.asarray, state.masks)

x, y = (RNG.normal(size=(8, 16)).astype(np.float32) for _ in range(2))
y = tree(1) if EXPLICIT else y
params, masks = train(None, x, y)
for layout in ("both",) if EXPLICIT else ("data parallel", "fsdp", "both"):
    with on(layout):
        there = place(y, layout) if EXPLICIT else put(y, "a")
        found, found_masks = train(layout, put(x, "a"), there)
    jax.tree.map(np.testing.assert_array_equal, found_masks, masks)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, params)
""",
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_jitted_init_places_masks_as_their_parameters(kind):
    run_on_mesh(
        kind,
        """
params = place(tree(0), "both") | {"narrow": put(np.ones((16, 12), np.float32), "a", "b")}
with jax.set_mesh(MESH):
    for name in ("magnitude", "rigl"):
        for packed in (False, True):
            tx = make(name, use_packed_masks=packed).wrap_optax(optax.sgd(0.1))
            for init in (tx.init, jax.jit(tx.init)):
                masks = init(params).masks
                # Eight bytes of 64 entries divide among four devices, two of 12 do not.
                narrow = P("a") if packed else P("a", "b")
                for mask, spec in ((masks["in"]["kernel"], P("a", "b")), (masks["narrow"], narrow)):
                    expected = NamedSharding(MESH, spec)
                    assert mask.sharding.is_equivalent_to(expected, 2), (name, packed, mask)
""",
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_no_array_of_an_update_has_the_size_of_an_unsharded_parameter(kind):
    run_on_mesh(
        kind,
        """
params = place(tree(0, 256, 512), "both")
largest = 256 * 512 // 8
with jax.set_mesh(MESH):
    for name, options in (("rigl", {"use_packed_masks": True}), ("set", {}),
                          ("global_saliency", {})):
        tx = make(name, **options).wrap_optax(optax.adam(0.01))
        shapes = jax.eval_shape(tx.init, params)
        shardings = sparsity.sharding_like(params, shapes)
        state = jax.tree.map(
            lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
            shapes, shardings)

        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        text = jax.jit(step, donate_argnums=(1, 2)).lower(params, state, params).compile().as_text()
        sizes = {math.prod(map(int, shape.split(",")))
                 for shape in re.findall(r"[a-z]+\\d+\\[([\\d,]+)\\]", text)}
        assert largest in sizes  # what the search must find: a device's part of a kernel
        assert max(sizes) <= 8 * largest - 1, (name, options, max(sizes) / largest)
""",
    )


def test_updates_inside_shard_map_and_pmap_prune_each_part():
    run_on_mesh(
        "Auto",
        """
updater = make("magnitude", update_start_step=0, update_end_step=0)
tx = updater.wrap_optax(optax.sgd(0.1))
w = RNG.normal(size=(8, 64)).astype(np.float32)

def train(w):
    updates, state = tx.update(w, tx.init(w), w)
    return optax.apply_updates(w, updates), state.masks

spec = P(("a", "b"))
mapped = jax.jit(jax.shard_map(train, mesh=MESH, in_specs=spec, out_specs=spec))
found = [mapped(w)]
if hasattr(jax, "pmap"):
    found.append([part[:, 0] for part in jax.pmap(train)(w[:, None])])
expected = np.stack([best(np.abs(row), 16) for row in w])
for kept, mask in found:
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(np.asarray(kept) != 0, expected != 0)
""",
    )
