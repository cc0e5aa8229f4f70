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
# These are not analysed, and multiply no matrices.
NO_PRODUCTS = frozenset((
    "after_all", "all_gather", "all_to_all", "approx_top_k", "axis_index", "create_token",
    "debug_callback", "debug_print", "empty2", "eq_to", "get", "igamma_grad_a", "le_to", "lt_to",
    "pmax", "pmin", "polygamma", "ppermute", "psum", "ragged_all_to_all", "random_gamma", "reduce",
    "rng_bit_generator", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
    "select_and_gather_add", "select_and_scatter", "select_and_scatter_add", "swap",
))  # fmt: skip
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
