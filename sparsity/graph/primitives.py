"""Families of jax's primitives that the analyses treat alike, by name."""

# Entry by entry: an output depends on the inputs' entries at the same place.
# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex",
    "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "device_put", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "mesh_cast", "min", "mul", "name", "ne", "neg", "nextafter", "not",
    "optimization_barrier", "or", "population_count", "pow", "pvary", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "reshard", "round", "rsqrt", "select_n",
    "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
))
# fmt: on
REDUCTIONS = frozenset(
    (
        "argmax",
        "argmin",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
        "reduce_xor",
    )
)
# They make entries of their own, whatever the place.
SOURCES = frozenset(
    (
        "iota",
        "random_bits",
        "random_clone",
        "random_fold_in",
        "random_seed",
        "random_split",
        "random_unwrap",
        "random_wrap",
        "rng_uniform",
        "threefry2x32",
    )
)
# fmt: on
