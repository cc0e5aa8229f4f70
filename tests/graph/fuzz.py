"""Random programs: what they couple must be what can be removed.

A program is a chain of steps on rows of values, each step on one or two of the values so far. Steps
are drawn from `STEPS`: products with weights of their own or of an earlier step, norms, attention,
gates, loops, and operations along channels whose removal would be noticed. `wrong` removes channels
of groups and compares with masking.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.graph import trace
from tests import helpers
from tests.graph import every_primitive, removal

ROWS, INPUTS, OUTPUTS = 2, 4, 3
WIDTHS = (4, 6, 8)
LARGEST = 24  # of the values that later steps read


@dataclasses.dataclass
class Model:
    """A random model: `model(params, x)`."""

    rng: np.random.Generator
    params: dict = dataclasses.field(default_factory=dict)
    steps: list[Callable] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=lambda: [INPUTS])
    names: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, params, x):
        values = [x]
        for step in self.steps:
            values.append(step(params, values))
        return sum(value @ params[f"out{i}"] for i, value in enumerate(values[-2:]))

    def value(self, fits=lambda size: True):
        """The index of a value, not the input if there is another; None if none fits."""
        fitting = [i for i, size in enumerate(self.sizes) if size <= LARGEST and fits(size)]
        return int(self.rng.choice(fitting[1:] or fitting)) if fitting else None

    def weight(self, *shape):
        """The name of a weight, sometimes that of an earlier step."""
        same = [name for name, weight in self.params.items() if weight.shape == shape]
        if same and self.rng.random() < 0.25:
            return str(self.rng.choice(same))
        name = f"w{len(self.params)}"
        self.params[name] = self.rng.normal(size=shape) / np.sqrt(shape[-1])
        return name

    def choose_one(self, choices):
        return choices[self.rng.integers(len(choices))]


def make(seed, steps=None, second=None):
    """A model of a few random steps, its parameters, and an input; of all steps by default.

    `second` names the primitive of the second step, see `every_primitive`.
    """
    model = Model(np.random.default_rng(seed))
    count = model.rng.integers(3, 7)
    while len(model.steps) < count:
        name = model.choose_one(["dense"] if not model.steps else steps or sorted(STEPS))
        step = STEPS[name]
        if second and len(model.steps) == 1:
            name, step = second, functools.partial(_primitive, second)
        made = step(model, model.value())
        if made is not None:
            size, step = made
            model.names.append(name)
            model.sizes.append(size)
            model.steps.append(step)
    for i, size in enumerate(model.sizes[-2:]):
        model.params[f"out{i}"] = model.rng.normal(size=(size, OUTPUTS))
    params = {name: jnp.asarray(weight) for name, weight in model.params.items()}
    return model, params, jnp.asarray(model.rng.normal(size=(ROWS, INPUTS)))


def wrong(seeds, tolerance=1e-10, steps=None, second=None):
    """Cuts channels of random programs, all groups of one or some of them.

    `second`: {seed: name of a primitive}, see `make`.

    Returns:
      {seed: what is wrong} of the programs whose outputs differ from those of masking, relative to
      their largest entry, by more than the tolerance; the number of groups that were cut.
    """
    second = second or {}
    cases = [case for seed in seeds if (case := _case(seed, steps, second.get(seed)))[-1]]

    def run(params):
        return [
            removal.outputs(graph, model, leaves, (x,), groups, removal.choose(groups, seed))
            for (seed, model, _, x, graph, groups), leaves in zip(cases, params, strict=True)
        ]

    with jax.enable_x64(True):
        errors = {}
        # Most of the time would be spent in compiling fusions.
        compiled = jax.jit(run, compiler_options=helpers.WITHOUT_EMITTERS)
        for case, pair in zip(cases, compiled([case[2] for case in cases]), strict=True):
            if not (error := removal.difference(*pair)) <= tolerance:
                errors[case[0]] = f"differs by {error:.1e}: {case[1].names}"
    return errors, sum(len(case[-1]) for case in cases)


def _case(seed, steps, second):
    with jax.enable_x64(True):
        model, params, x = make(seed, steps, second)
        graph = trace(model, params, x)
        some = np.random.default_rng(seed).random(len(graph.groups)) < (0.4 if seed % 2 else 1.1)
        groups = [group for group, is_cut in zip(graph.groups, some, strict=True) if is_cut]
        return seed, model, params, x, graph, groups


# Steps: each returns the size of its value, and how it is computed.


def _dense(model, i):
    size = int(model.choose_one(WIDTHS))
    kernel = model.weight(model.sizes[i], size)
    return size, lambda p, v: v[i] @ p[kernel]


def _dense_and_bias(model, i):
    size = int(model.choose_one(WIDTHS))
    kernel, bias = model.weight(model.sizes[i], size), model.weight(size)
    return size, lambda p, v: v[i] @ p[kernel] + p[bias]


def _transposed(model, i):
    size = int(model.choose_one(WIDTHS))
    kernel = model.weight(size, model.sizes[i])
    return size, lambda p, v: v[i] @ p[kernel].T


def _residual(model, i):
    up, down = model.weight(model.sizes[i], 6), model.weight(6, model.sizes[i])
    return model.sizes[i], lambda p, v: v[i] + jnp.tanh(v[i] @ p[up]) @ p[down]


def _activation(model, i):
    fn = model.choose_one(
        [jax.nn.relu, jnp.tanh, jax.nn.sigmoid, jnp.cos, jax.nn.gelu, jax.nn.silu, jnp.abs]
    )
    return model.sizes[i], lambda p, v: fn(v[i])


def _softmax(model, i):
    return model.sizes[i], lambda p, v: jax.nn.softmax(v[i])


def _scale(model, i):
    scale = model.weight(model.sizes[i])
    return model.sizes[i], lambda p, v: v[i] * p[scale]


def _shift(model, i):
    shift = model.weight(model.sizes[i])
    return model.sizes[i], lambda p, v: v[i] + p[shift]


def _product(model, i):
    j = model.value(lambda size: size == model.sizes[i])
    return model.sizes[i], lambda p, v: v[i] * jnp.tanh(v[j])


def _concatenation(model, i):
    j = model.value(lambda size: size <= 8)
    if j is None:
        return None
    size = model.sizes[i] + model.sizes[j]
    return size, lambda p, v: jnp.concatenate([v[i], v[j]], -1)


def _gate(model, i):
    if model.sizes[i] % 2:
        return None

    def step(p, v):
        gate, up = jnp.split(v[i], 2, -1)
        return jax.nn.silu(gate) * up

    return model.sizes[i] // 2, step


def _slice(model, i):
    start = int(model.rng.integers(0, model.sizes[i] - 1))
    end = int(model.rng.integers(start + 1, model.sizes[i])) + 1
    return end - start, lambda p, v: v[i][:, start:end]


def _heads(model, i, transpose=False):
    if model.sizes[i] % 2:
        return None

    def step(p, v):
        heads = v[i].reshape(ROWS, 2, -1)
        return (heads.transpose(0, 2, 1) if transpose else jnp.sin(heads)).reshape(ROWS, -1)

    return model.sizes[i], step


def _shuffle(model, i):
    return _heads(model, i, transpose=True)


def _rms_norm(model, i):
    scale = model.weight(model.sizes[i])

    def step(p, v):
        return v[i] * lax.rsqrt((v[i] ** 2).mean(-1, keepdims=True) + 1e-3) * p[scale]

    return model.sizes[i], step


def _layer_norm(model, i):
    def step(p, v):
        centred = v[i] - v[i].mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3)

    return model.sizes[i], step


def _fast_layer_norm(model, i):
    scale = model.weight(model.sizes[i])

    def step(p, v):
        mean, square = v[i].mean(-1, keepdims=True), (v[i] ** 2).mean(-1, keepdims=True)
        return (v[i] - mean) * lax.rsqrt(jnp.abs(square - mean**2) + 1e-3) * p[scale]

    return model.sizes[i], step


def _norm_with_scale(model, i):
    """Statistics of centred values, whose parts may lie within calls of their own."""
    scale, bias = model.weight(model.sizes[i]), model.weight(model.sizes[i])
    measure = model.choose_one(
        [jnp.square, jnp.abs, lambda x: jnp.exp(-x), lambda x: jnp.cos(x) - x]
    )
    calls = [lambda fn: fn, lambda fn: fn, jax.jit, jax.jit, jax.checkpoint]
    inside, between = model.choose_one(calls), model.choose_one(calls)
    offset = model.choose_one([jnp.mean, jnp.sum])

    def step(p, v):
        centred = inside(lambda x: x - offset(jnp.tanh(x), axis=-1, keepdims=True))(v[i])
        spread = between(lambda x: measure(x).mean(-1, keepdims=True))(centred)
        return centred / (1 + jnp.abs(spread)) * p[scale] + p[bias]

    return model.sizes[i], step


def _block(model, i):
    """A layer of a residual stream: two products after a norm, in a scan or not."""
    _, norm = model.choose_one([_rms_norm, _fast_layer_norm, _norm_with_scale, _norm_with_scale])(
        model, i
    )
    up, down = model.weight(model.sizes[i], 6), model.weight(6, model.sizes[i])
    around = model.choose_one([lambda fn: fn, jax.checkpoint])
    steps = model.choose_one([0, 2])

    def step(p, v):
        def layer(x, _=None):
            values = [*v[:i], x, *v[i + 1 :]]
            return x + jnp.tanh(norm(p, values) @ p[up]) @ p[down], None

        return lax.scan(around(layer), v[i], length=steps)[0] if steps else around(layer)(v[i])[0]

    return model.sizes[i], step


def _group_norm(model, i):
    if model.sizes[i] % 2:
        return None

    def step(p, v):
        x = v[i].reshape(ROWS, 2, -1)
        return (x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)).reshape(ROWS, -1)

    return model.sizes[i], step


def _grouped_product(model, i):
    if model.sizes[i] % 2:
        return None
    kernel = model.weight(2, model.sizes[i] // 2, 4)

    def step(p, v):
        return jnp.einsum("bgi,gio->bgo", v[i].reshape(ROWS, 2, -1), p[kernel]).reshape(ROWS, -1)

    return 8, step


def _convolution(model, i):
    groups = model.choose_one([1, 2, model.sizes[i]])
    if model.sizes[i] % groups or model.sizes[i] > 12:
        return None
    out = 2 * groups if groups > 1 else 6
    kernel = model.weight(2, model.sizes[i] // groups, out)

    def step(p, v):
        image = v[i][None]  # rows are positions
        return lax.conv_general_dilated(
            image, p[kernel], (1,), "SAME", feature_group_count=groups,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )[0]  # fmt: skip

    return out, step


def _attention(model, i):
    size = model.sizes[i]
    query, key, value, out = [*(model.weight(size, 8) for _ in range(3)), model.weight(8, size)]

    def step(p, v):
        q, k, val = ((v[i] @ p[name]).reshape(ROWS, 2, 4) for name in (query, key, value))
        weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
        return v[i] + jnp.einsum("hts,shd->thd", weights, val).reshape(ROWS, 8) @ p[out]

    return size, step


def _fused(model, i):
    kernel = model.weight(model.sizes[i], 12)

    def step(p, v):
        a, b, c = jnp.moveaxis((v[i] @ p[kernel]).reshape(ROWS, 3, 4), 1, 0)
        return a * b + c

    return 4, step


def _rotary(model, i):
    if model.sizes[i] % 2:
        return None

    def step(p, v):
        one, other = jnp.split(v[i], 2, -1)
        angle = jnp.arange(ROWS)[:, None] / (1 + jnp.arange(one.shape[-1]))
        return jnp.concatenate(
            [one * jnp.cos(angle) - other * jnp.sin(angle),
             other * jnp.cos(angle) + one * jnp.sin(angle)], -1,
        )  # fmt: skip

    return model.sizes[i], step


def _scan(model, i):
    size = model.sizes[i]
    up, down = model.weight(3, size, 4), model.weight(3, 4, size)

    def layer(x, kernels):
        return x + jax.nn.relu(x @ kernels[0]) @ kernels[1], None

    return size, lambda p, v: lax.scan(layer, v[i], (p[up], p[down]))[0]


def _recurrence(model, i):
    kernel = model.weight(model.sizes[i], model.sizes[i])

    def step(p, v):
        return lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ p[kernel]), v[i])

    return model.sizes[i], step


def _while(model, i):
    def step(p, v):
        def go_on(carry):
            return (carry[0] < 3) & (jnp.abs(carry[1]).sum() > 1e-3)

        return lax.while_loop(go_on, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, v[i]))[1]

    return model.sizes[i], step


def _cond(model, i):
    shift = model.weight(model.sizes[i])

    def step(p, v):
        return lax.cond(v[i].sum() > 0, lambda x: x + p[shift], jnp.cos, v[i])

    return model.sizes[i], step


def _remat(model, i):
    kernel = model.weight(model.sizes[i], model.sizes[i])
    return model.sizes[i], lambda p, v: jax.checkpoint(lambda x: jax.nn.relu(x @ p[kernel]))(v[i])


def _outer(model, i):
    j = model.value(lambda size: size * model.sizes[i] <= LARGEST)
    if j is None:
        return None

    def step(p, v):
        return (v[i][:, :, None] * v[j][:, None, :]).reshape(ROWS, -1)

    return model.sizes[i] * model.sizes[j], step


def _inner(model, i):
    return ROWS, lambda p, v: v[i] @ v[i].T


def _mean_all(model, i):
    fn = model.choose_one([jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.prod, jnp.argmax])
    return model.sizes[i], lambda p, v: jnp.sin(v[i]) * fn(v[i], -1, keepdims=True)


def _any_or_all(model, i):
    fn, bound = model.choose_one([jnp.any, jnp.all]), model.choose_one([0.0, 0.5, -0.5])
    return model.sizes[i], lambda p, v: v[i] * (1 + fn(v[i] > bound, -1, keepdims=True))


def _where(model, i):
    j, other = model.value(lambda size: size == model.sizes[i]), model.choose_one([0.0, 1.0])
    return model.sizes[i], lambda p, v: jnp.where(v[j] > 0, v[i], other)


def _masked_softmax(model, i):
    def step(p, v):
        logits = jnp.where(v[i] == 0, -jnp.inf, v[i])
        return jnp.exp(logits) / (1e-3 + jnp.exp(logits).sum(-1, keepdims=True))

    return model.sizes[i], step


def _positions(model, i):
    return model.sizes[i], lambda p, v: v[i] * jnp.arange(model.sizes[i])


def _moved(model, i):
    fn = model.choose_one(
        [
            lambda x: jnp.cumsum(x, -1),
            lambda x: x[:, ::-1],
            lambda x: jnp.sort(x, -1),
            lambda x: jnp.roll(x, 1, -1),
            lambda x: lax.top_k(x, x.shape[-1])[0],
            lambda x: lax.reshape(x, x.shape, (1, 0)),
            lambda x: jnp.cumsum(x, 0),
            lambda x: x[::-1],
            lambda x: jnp.sort(x, 0),
            lambda x: x[:, jnp.arange(x.shape[-1]) // 2],
            lambda x: x.at[:, 0].set(1.0),
        ]
    )
    return model.sizes[i], lambda p, v: fn(v[i])


def _repeated(model, i):
    fn = model.choose_one(
        [
            lambda x: jnp.repeat(x, 2, -1),
            lambda x: jnp.tile(x, (1, 2)),
            lambda x: jnp.pad(x, ((0, 0), (0, x.shape[-1]))),
        ]
    )
    return 2 * model.sizes[i], lambda p, v: fn(v[i])


def _log_of_sums(model, i):
    fn = model.choose_one(
        [
            lambda x: jnp.einsum("rc,rc->c", jnp.exp(x), jnp.exp(x)),
            lambda x: jnp.exp(x).sum(0),
            lambda x: jnp.cumsum(jnp.exp(x), 0),
            lambda x: lax.conv_general_dilated(
                jnp.exp(x)[None], jnp.ones((2, 1, x.shape[-1])), (1,), "SAME",
                feature_group_count=x.shape[-1], dimension_numbers=("NWC", "WIO", "NWC"),
            )[0],
        ]
    )  # fmt: skip
    return model.sizes[i], lambda p, v: v[i] + jnp.log(fn(v[i]))


def _lookup(model, i):
    options = model.choose_one([{"mode": "fill", "fill_value": 2.0}, {"mode": "fill"}, {}])

    def step(p, v):
        rows = v[i].at[jnp.array([0, ROWS])].get(**options)
        return jnp.where(jnp.isnan(rows), 1.0, rows)

    return model.sizes[i], step


def _primitive(name, model, i):
    along_rows = every_primitive.ALONG_ROWS if model.rng.random() < 0.3 else {}
    fn = along_rows.get(name) or every_primitive.FUNCTIONS[name]
    if name in every_primitive.WITH_WEIGHT:
        kernel = model.weight(model.sizes[i], model.sizes[i])
        return model.sizes[i], lambda p, v: fn(v[i], p[kernel])
    return model.sizes[i], lambda p, v: fn(v[i])


def _stack(model, i):
    return model.sizes[i], lambda p, v: sum(jnp.unstack(jnp.stack([v[i], jnp.cos(v[i])])))


def _scattered(model, i):
    j = model.value(lambda size: size == model.sizes[i])
    name = model.choose_one(["add", "apply", "max", "min", "multiply", "set", "subtract"])
    index = model.choose_one([[0], [1, 0], [1, ROWS]])  # the last one drops a row

    def update(p, v):
        rows = v[i].at[np.array(index)]
        return rows.apply(jnp.cos) if name == "apply" else getattr(rows, name)(v[j][: len(index)])

    return model.sizes[i], model.choose_one([
        update,
        lambda p, v: jax.ops.segment_sum(v[j], np.array([1, 1]), ROWS) * v[i],
        lambda p, v: v[i].at[:, :2].add(v[j][:, :2]),
    ])  # fmt: skip


STEPS = {
    fn.__name__[1:]: fn
    for fn in (
        _dense, _dense_and_bias, _transposed, _residual, _activation, _softmax, _scale, _shift,
        _product, _concatenation, _gate, _slice, _heads, _shuffle, _rms_norm, _layer_norm,
        _fast_layer_norm, _norm_with_scale, _block, _group_norm, _grouped_product, _convolution,
        _attention, _fused, _rotary,
        _scan, _recurrence, _while, _cond, _remat, _outer, _inner, _mean_all, _any_or_all, _where,
        _masked_softmax, _positions, _moved, _repeated, _log_of_sums, _lookup, _stack,
        _scattered,
    )
}  # fmt: skip
# Programs of these have a residual stream.
STREAM = ("block", "dense_and_bias", "norm_with_scale", "residual", "scale", "scan", "shift")
