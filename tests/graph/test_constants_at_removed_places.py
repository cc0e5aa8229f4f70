"""Constants at removed places: what operations make of them decides what may be cut.

Each program is either refused or, cut, equal to the masked model: `check` compares the two.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparsity.graph import trace
from tests.graph import removal

ROWS, CHANNELS = 4, 6


def cut(between):
    """Traces `between` a product and a sum, compares each group's removal with its masking.

    Returns the names of the groups and the reasons why channels of the first product are refused.
    """

    def fn(params, x):
        return between(x @ params["up"]).sum(-1)

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = {"up": jnp.asarray(rng.normal(size=(3, CHANNELS)))}
        x = jnp.asarray(rng.normal(size=(ROWS, 3)))
        graph = trace(fn, params, x)
        for group in graph.groups:
            pair = removal.outputs(graph, fn, params, (x,), [group], removal.choose([group]))
            assert removal.difference(*pair) <= 1e-10
    reasons = [r.reason for r in graph.refused if (r.path, r.axis) == (("up",), 1)]
    return [group.name for group in graph.groups], reasons


def depthwise(x, kernel):
    """[ROWS, CHANNELS] as positions of an image, each channel by itself."""
    return lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", feature_group_count=CHANNELS,
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0]  # fmt: skip


def looked_up(x, **options):
    return x.at[jnp.arange(ROWS) + 2].get(**options)


# Where channels are masked the value is 1, and a sum of n products of it is n: log(n) is not 0.
COUNTS = {
    "batched dot": lambda x: jnp.log(jnp.einsum("rc,rc->c", jnp.exp(x), jnp.exp(x)))[None],
    "batched dot of ones": lambda x: jnp.log(jnp.einsum("rc,rc->c", jnp.exp(x), 1 + 0 * x))[None],
    "sum over positions": lambda x: jnp.log(jnp.exp(x).sum(0, keepdims=True)),
    "sum of windows": lambda x: jnp.log(
        lax.reduce_window(jnp.exp(x), 0.0, lax.add, (2, 1), (1, 1), "VALID")
    ),
    "running sum": lambda x: jnp.log(jnp.cumsum(jnp.exp(x), 0)),
}
# Functions of channels that a smaller program cannot compute for a removed one.
UNKNOWN = {
    "depthwise convolution": lambda x: jnp.log(depthwise(jnp.exp(x), jnp.ones((3, 1, CHANNELS)))),
    "in a call": lambda x: jnp.log(jax.checkpoint(lambda x: jnp.exp(x).cumsum(0))(x)),
}
# Where channels are masked a lookup that is out of range puts something else than the constant.
LOOKUPS = {
    "number": lambda x: looked_up(x, mode="fill", fill_value=3.0),
    "number of integers": lambda x: looked_up(jnp.sign(x).astype(jnp.int32), mode="fill") / 1e9,
}
# NaN that becomes a number, which the constants do not tell.
REMOVED_NANS = {
    "nan made a number": lambda x: jnp.nan_to_num(looked_up(x, mode="fill"), nan=5.0),
    "nan compared": lambda x: jnp.where(looked_up(x, mode="fill") == 0, 0.0, 2.0),
    "nan cast": lambda x: 1.0 + jnp.isnan(looked_up(x, mode="fill")),
}
# Constants that numpy computes in another way than the compiler.
ARITHMETIC = {
    "quotient of integers": lambda x: (x.astype(jnp.int32) + 7) // 2 - 3.5,
    "quotient cut towards zero": lambda x: lax.div(x.astype(jnp.int32) - 7, jnp.int32(2)) + 3.5,
    "fewer bits": lambda x: lax.reduce_precision(x + 1.001, 8, 3) - 1.001,
    "large integers": lambda x: (x.astype(jnp.int64) + (2**53 + 1) - jnp.int64(2**53)).astype(
        jnp.float64
    ),
}


@pytest.mark.parametrize("between", [*UNKNOWN.values()], ids=[*UNKNOWN])
def test_a_sum_of_known_factors_other_than_zero_is_not_known(between):
    names, reasons = cut(between)
    assert names == []
    assert any("not known" in reason for reason in reasons)


@pytest.mark.parametrize("between", [*COUNTS.values(), *LOOKUPS.values()], ids=[*COUNTS, *LOOKUPS])
def test_what_all_masked_channels_hold_is_computed_by_the_smaller_program(between):
    assert cut(between)[0] == ["up:1"]


@pytest.mark.parametrize("between", [*REMOVED_NANS.values()], ids=[*REMOVED_NANS])
def test_what_a_lookup_puts_out_of_range_reaches_masked_channels_too(between):
    assert cut(between)[0] == []


@pytest.mark.parametrize("between", [*ARITHMETIC.values()], ids=[*ARITHMETIC])
def test_constants_are_those_of_the_compiler(between):
    names, _ = cut(between)  # which compares outputs: the smaller program computes what is unknown
    assert names in ([], ["up:1"])


@pytest.mark.parametrize(
    "between",
    [
        lambda x: looked_up(x, mode="clip"),
        lambda x: looked_up(x, mode="fill", fill_value=0.0),
        lambda x: x.at[jnp.arange(ROWS)].get(mode="fill"),
        lambda x: lax.div(x.astype(jnp.int32) - 7, jnp.int32(2)) + 3.0,
        lambda x: jnp.einsum("rc,rc->c", x, jnp.exp(x))[None],
        lambda x: jnp.cos(x).prod(0, keepdims=True) - 1,
    ],
    ids=["clip", "fill with 0", "in range", "integers", "zero factor", "product of ones"],
)
def test_constants_that_stay_let_channels_go(between):
    assert cut(between)[0] == ["up:1"]


@pytest.mark.parametrize(
    ("dtype", "reduce", "constant"),
    [
        (jnp.bool_, lax.reduce_and, True),
        (jnp.int32, lax.reduce_and, -1),
        (jnp.uint8, lax.reduce_and, 255),
        (jnp.int32, lax.reduce_or, 0),
        (jnp.int32, lax.reduce_max, -(2**31)),
        (jnp.int8, lax.reduce_min, 127),
        (jnp.uint8, lax.reduce_max, 0),
    ],
)
def test_the_neutral_element_is_that_of_the_dtype(dtype, reduce, constant):
    def between(other):
        def run(x):
            entries = jnp.where(x == 0, jnp.asarray(other, dtype), jnp.asarray(1, dtype))
            return x * (1 + reduce(entries, (1,))[:, None].astype(x.dtype))

        return run

    assert cut(between(constant))[0] == ["up:1"]
    assert cut(between(0 if constant else 1))[0] == []
