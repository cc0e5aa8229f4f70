"""Sums of squares of the outputs that weights give, by the program of the product alone.

A run outside of `jit` compiles each product by itself, and keeps the program. The product of the
same inputs with lost weights is this program again: sums of its outputs compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.statistics.alignment import Alignment
from sparsity.core import host
from sparsity.core.dtypes import promote
from sparsity.graph import Use
from sparsity.programs.products import read_product


def make_rerun(
    use: Use, alignment: Alignment, matrices: Sequence[jax.Array], place: host.HostPlace
) -> Callable[[jax.Array], np.ndarray] | None:
    """Returns a function from the operand beside a weight to the sums of |y|^2 with each matrix.

    Args:
      use: the product; `None` is returned if its outputs lose digits.
      alignment: alignment of the use, without the axes that scans took apart.
      matrices: [*batch, outputs, inputs] each, in the order of the parameter.
      place: the place of matrices and inputs.
    """
    value = use.equation.inputs[use.operand]
    if not _is_wide(use, matrices) or matrices[0].size != value.size:
        return None
    roles = read_product(use.equation).operands[use.operand]
    axes = (*roles.batch, *roles.free, *roles.contracted)
    sizes, order = [value.shape[axis] for axis in axes], np.argsort(axes)
    weights = [np.asarray(alignment.operand(each)) for each in host.to_numpy(list(matrices))]
    operands = [each.astype(value.dtype).reshape(sizes).transpose(order) for each in weights]
    operands = place.put([host.copy(each) for each in operands])

    def sum_outputs(x: jax.Array) -> np.ndarray:
        pairs = [[x, w] if use.operand else [w, x] for w in operands]
        outputs = (use.equation.bind(pair)[0] for pair in pairs)
        with np.errstate(all="ignore"):
            return np.array([_sum_squares(np.asarray(y).reshape(-1)) for y in outputs])

    return sum_outputs


def _sum_squares(x: np.ndarray) -> float:
    """Returns the sum of x^2 over real numbers, by parts that stay in the caches."""
    return sum(float(np.square(x[at]).sum()) for at in host.chunks(len(x)))


def _is_wide(use: Use, matrices: Sequence[jax.Array]) -> bool:
    """Returns whether a product on a CPU has the precision of sums: real, in float32 at least."""
    equation = use.equation
    dtypes = {value.dtype for value in (*equation.inputs, *equation.outputs)}
    dtypes.update(promote(x.dtype, jnp.float32) for x in matrices)
    precision = equation.params["precision"]
    each = precision if isinstance(precision, tuple) else (precision,)
    is_plain = all(x is None or isinstance(x, lax.Precision) for x in each)
    return is_plain and len(dtypes) == 1 and dtypes <= {np.dtype("float32"), np.dtype("float64")}
