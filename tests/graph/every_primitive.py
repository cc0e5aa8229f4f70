"""A function for each primitive of the tables of `sparsity.programs`, for random programs.

A function takes rows [2, size] and returns an array of that shape. Those of `WITH_WEIGHT` get a
weight [size, size], too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.scipy.special import betainc
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# Primitives that only programs on meshes have, see tests/scripts, and one that no function binds.
NOT_DRAWN = {"copy_p", "mesh_cast", "pvary", "reshard"}
# Not all versions of jax have them.
IN_SOME_VERSIONS = {"log2", "one_minus_square", "scatter-sub", "stack", "tile", "unstack"}
WITH_WEIGHT = {"dot_general", "ragged_dot_general"}


def below_one(x):
    return 0.9 * jnp.tanh(x)


def above_one(x):
    return 1.5 + jnp.tanh(x) / 4


def integers(x):
    return (8 * x).astype(jnp.int32)


def as_complex(x):
    return lax.complex(x, 1 - x)


def is_positive(x):
    return x > 0


def make_key(x):
    return jax.random.key(x.shape[0])


def random_as(x, key):
    return jax.random.uniform(key, x.shape, x.dtype)


def on_mesh(x):
    mesh = jax.make_mesh((1,), ("a",), (AxisType.Auto,), devices=jax.devices()[:1])
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def threefry(x):
    words = [jnp.full(x.shape[-1:], n, jnp.uint32) for n in range(4)]
    return primitives.threefry2x32_p.bind(*words)[0] / 2**32


def along(axis):
    """Functions of the primitives that join entries, along an axis."""
    joined = {
        "argmax": lambda x: jnp.argmax(x, axis, keepdims=True),
        "argmin": lambda x: jnp.argmin(x, axis, keepdims=True),
        "reduce_and": lambda x: jnp.all(is_positive(x + 1), axis, keepdims=True),
        "reduce_max": lambda x: jnp.max(x, axis, keepdims=True),
        "reduce_min": lambda x: jnp.min(x, axis, keepdims=True),
        "reduce_or": lambda x: jnp.any(is_positive(x - 1), axis, keepdims=True),
        "reduce_prod": lambda x: jnp.prod(x, axis, keepdims=True),
        "reduce_sum": lambda x: jnp.sum(x, axis, keepdims=True),
        "reduce_xor": lambda x: jnp.expand_dims(lax.reduce_xor(integers(x), (axis,)), axis),
    }
    window, padding = (1, 3)[:: axis * 2 - 1], [((0, 0), (1, 1))[i != axis] for i in (0, 1)][::-1]
    options = {"window_dimensions": window, "window_strides": (1, 1), "padding": padding}

    def start(value, x):
        return jnp.asarray(value, x.dtype)

    def update(name, x):
        rows = x.at[(slice(None),) * axis + (np.array([1]),)]
        return getattr(rows, name)(lax.slice_in_dim(jnp.sin(x), 0, 1, axis=axis))

    window_functions = {
        "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis),
        "cummax": lambda x: lax.cummax(x, axis),
        "cummin": lambda x: lax.cummin(x, axis),
        "cumprod": lambda x: lax.cumprod(x, axis),
        "cumsum": lambda x: lax.cumsum(x, axis),
        "reduce_window": lambda x: lax.reduce_window(
            x, start(0, x), lambda a, b: a + 2 * b, **options
        ),
        "reduce_window_max": lambda x: lax.reduce_window(x, -np.inf, lax.max, **options),
        "reduce_window_min": lambda x: lax.reduce_window(x, np.inf, lax.min, **options),
        "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, **options),
        "rev": lambda x: lax.rev(x, (axis,)),
        "sort": lambda x: lax.sort(x, axis),
        "dynamic_slice": lambda x: lax.dynamic_slice_in_dim(
            jnp.concatenate([x, jnp.sin(x)], axis), 1, x.shape[axis], axis
        ),
        "dynamic_update_slice": lambda x: lax.dynamic_update_slice_in_dim(
            x, lax.slice_in_dim(jnp.sin(x), 0, 1, axis=axis), 1, axis
        ),
        "gather": lambda x: jnp.take(x, jnp.arange(x.shape[axis])[::-1], axis),
        "concatenate": lambda x: lax.slice_in_dim(
            jnp.concatenate([x, jnp.sin(x)], axis), 1, x.shape[axis] + 1, axis=axis
        ),
        "pad": lambda x: lax.slice_in_dim(
            jnp.pad(x, [(1, 1)[:1] * 2 if i == axis else (0, 0) for i in (0, 1)]),
            1, x.shape[axis] + 1, axis=axis,
        ),
        "scatter": functools.partial(update, "set"),
        "scatter-add": functools.partial(update, "add"),
        "scatter-max": functools.partial(update, "max"),
        "scatter-min": functools.partial(update, "min"),
        "scatter-mul": functools.partial(update, "multiply"),
        "scatter-sub": functools.partial(update, "subtract"),
        "slice": lambda x: jnp.concatenate(
            [lax.slice_in_dim(x, 0, 1, axis=axis),
             jnp.sin(lax.slice_in_dim(x, 1, x.shape[axis], axis=axis))], axis
        ),
        "split": lambda x: sum(jnp.split(jnp.concatenate([x, jnp.sin(x)], axis), 2, axis)),
    }  # fmt: skip
    products = {name: lambda x, fn=fn: jnp.sin(x) * fn(x) for name, fn in joined.items()}
    return products | window_functions


_UNARY = (
    "abs", "asinh", "atan", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos", "cosh", "erf",
    "erfc", "exp", "exp2", "expm1", "floor", "logistic", "neg", "round", "sign", "sin", "sinh",
    "square", "stop_gradient", "tan", "tanh",
)  # fmt: skip
_BELOW_ONE = ("acos", "asin", "atanh", "erf_inv")
_ABOVE_ONE = ("acosh", "digamma", "lgamma", "log", "log1p", "rsqrt", "sqrt")
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")


def _apply(fn, prepare, x):
    return fn(prepare(x))


def _choose(compare, x):
    return x * compare(x, jnp.zeros_like(x))


FUNCTIONS = {
    **{name: getattr(lax, name) for name in _UNARY},
    **{name: functools.partial(_apply, getattr(lax, name), below_one) for name in _BELOW_ONE},
    **{name: functools.partial(_apply, getattr(lax, name), above_one) for name in _ABOVE_ONE},
    **{name: functools.partial(_choose, getattr(lax, name)) for name in _COMPARISONS},
    **along(1),
    "add": lambda x: x + 1,
    "add_any": jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)),
    "and": lambda x: x * (is_positive(x) & is_positive(1 - x)),
    "atan2": lambda x: lax.atan2(x, above_one(x)),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int64), jnp.float64
    ),
    "broadcast_in_dim": lambda x: x + jnp.broadcast_to(x[:1], x.shape),
    "clamp": lambda x: lax.clamp(-0.5, x, 0.5),
    "clz": lambda x: lax.clz(integers(x)) / 32,
    "complex": lambda x: lax.abs(as_complex(x)),
    "conj": lambda x: lax.imag(lax.conj(as_complex(x))),
    "conv_general_dilated": lambda x: lax.conv_general_dilated(
        x[None], jnp.ones((2, 1, x.shape[-1])), (1,), "SAME",
        feature_group_count=x.shape[-1], dimension_numbers=("NWC", "WIO", "NWC"),
    )[0],
    "convert_element_type": lambda x: x.astype(jnp.float32).astype(x.dtype),
    "copy": lambda x: jnp.array(x, copy=True),
    "device_put": lambda x: jax.device_put(x),
    "div": lambda x: x / above_one(x),
    "dot_general": lambda x, w: x @ w,
    "igamma": lambda x: lax.igamma(jnp.full_like(x, 1.5), x * x),
    "igammac": lambda x: lax.igammac(jnp.full_like(x, 1.5), x * x),
    "imag": lambda x: lax.imag(as_complex(x)),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "iota": lambda x: x * jnp.arange(x.shape[-1]),
    "is_finite": lambda x: x * lax.is_finite(x),
    "log2": lambda x: jnp.log2(above_one(x)),
    "max": lambda x: lax.max(x, jnp.sin(x)),
    "min": lambda x: lax.min(x, jnp.cos(x)),
    "mul": lambda x: x * jnp.sin(x),
    "name": lambda x: checkpoint_name(x, "rows"),
    "nextafter": lambda x: lax.nextafter(x, x + 1),
    "not": lambda x: x * ~is_positive(x),
    "one_minus_square": jax.grad(lambda x: jnp.sum(jnp.tanh(x))),
    "optimization_barrier": lax.optimization_barrier,
    "or": lambda x: x * (is_positive(x) | is_positive(-1 - x)),
    "population_count": lambda x: lax.population_count(integers(x)) / 32,
    "pow": lambda x: above_one(x) ** x,
    "ragged_dot_general": lambda x, w: lax.ragged_dot(x, jnp.stack([w, -w]), jnp.array([1, 1])),
    "random_bits": lambda x: x * jax.random.bits(make_key(x), x.shape) / 2**32,
    "random_clone": lambda x: x * random_as(x, jax.random.clone(make_key(x))),
    "random_fold_in": lambda x: x * random_as(x, jax.random.fold_in(make_key(x), 1)),
    "random_seed": lambda x: x * random_as(x, make_key(x)),
    "random_split": lambda x: x * random_as(x, jax.random.split(make_key(x))[0]),
    "random_unwrap": lambda x: x * (1 + jax.random.key_data(make_key(x))[0]),
    "random_wrap": lambda x: x * random_as(
        x, jax.random.wrap_key_data(jnp.arange(2, dtype=jnp.uint32))
    ),
    "real": lambda x: lax.real(as_complex(x) ** 2),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 10),
    "regularized_incomplete_beta": lambda x: betainc(1.5, 2.5, jax.nn.sigmoid(x)),
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.75)),
    "reshape": lambda x: jnp.sin(x.reshape(x.shape[0], 2, -1)).reshape(x.shape),
    "rng_uniform": lambda x: x + 0 * lax.rng_uniform(0.0, 1.0, x.shape),
    "select_n": lambda x: lax.select_n(is_positive(x), x, jnp.cos(x)),
    "sharding_constraint": on_mesh,
    "shift_left": lambda x: (integers(x) << 1) / 8,
    "shift_right_arithmetic": lambda x: lax.shift_right_arithmetic(integers(x), jnp.int32(1)) / 8,
    "shift_right_logical": lambda x: lax.shift_right_logical(integers(x), jnp.int32(1)) / 2**28,
    "squeeze": lambda x: lax.squeeze(jnp.sin(x[None]), (0,)),
    "stack": lambda x: jnp.stack([x, jnp.cos(x)])[1],
    "sub": lambda x: x - jnp.sin(x),
    "threefry2x32": lambda x: x * threefry(x),
    "tile": lambda x: jnp.tile(x, (1, 2))[:, : x.shape[-1]],
    "top_k": lambda x: lax.top_k(x, x.shape[-1])[0],
    "transpose": lambda x: jnp.sin(x.T).T,
    "unstack": lambda x: jnp.stack(jnp.unstack(x)[::-1]),
    "xor": lambda x: x * (is_positive(x) ^ is_positive(x - 1)),
    "zeta": lambda x: lax.zeta(2 + x * x, above_one(x)),
}  # fmt: skip
ALONG_ROWS = along(0)


def names_in(fn, *args):
    """Returns the names of all primitives of a program, those of its bodies too."""
    names = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            names.add(equation.primitive.name)
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return names
