"""Places where a run reaches a weight, and the sums of its inputs or outputs there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration import host
from sparsity.calibration.run.frames import Frame, ScanLayers
from sparsity.calibration.run.reuse import compile_at_call
from sparsity.calibration.statistics.alignment import Alignment
from sparsity.calibration.statistics.capture import Calibration
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.summing import (
    Steps,
    SummingInterpreter,
    Sums,
    Uses,
    add,
    add_in_place,
    is_count,
)
from sparsity.calibration.statistics.validation import is_finite, make_not_finite_error
from sparsity.core.arrays import promote
from sparsity.core.trees import PyTree
from sparsity.graph import Use
from sparsity.programs.products import read_product
from sparsity.programs.program import Equation


@dataclasses.dataclass(frozen=True)
class ReachedWeight:
    """Place where the program reaches a weight: a product, or the loop or branch around it.

    Attributes:
      calibration: sums up inputs.
      frame: holds the inputs of the equation.
      equation: a product, a scan or a cond.
      layers: the layers of the scans within the equation that take the weight apart, by index of
        the use; all uses read the weight along the same axes.
    """

    calibration: Calibration
    frame: Frame
    equation: Equation
    layers: Mapping[int, ScanLayers]

    def sum_statistic(self, name: str) -> Statistic:
        """Returns the statistic of the inputs in all batches, and in all steps of a loop.

        Raises:
          ValueError: inputs are not finite; the error names the batch.
        """
        total = _add_up(self._sum_batches(self.calibration.sum_inputs), name)
        return functools.reduce(add, [total[n] for n in sorted(total)])

    def sum_losses(self, *matrices: jax.Array) -> jax.Array:
        """Returns the sums of |y|^2 over the outputs y of each matrix."""
        rerun_losses = self._rerun_losses(matrices)
        if rerun_losses is not None:
            return rerun_losses
        batches = self._sum_batches(self.calibration.sum_outputs, *matrices)
        sums = [total for sums_of_batch in batches for total in sums_of_batch.values()]
        return functools.reduce(jnp.add, sums)

    def _rerun_losses(self, matrices: Sequence[jax.Array]) -> jax.Array | None:
        """Returns the losses by programs that the run needs anyway; `None` if there are none."""
        if self.equation.inner_programs:
            return None
        batches = range(len(self.frame.data))
        operands = {n: [self._read_operand(batch, n) for batch in batches] for n in self.layers}
        device = host.find_host_device(operands, matrices)
        reruns = all(_can_rerun(self.calibration.uses[n], matrices) for n in operands)
        if device is None or not reruns:
            return None
        total = np.zeros(len(matrices))
        for use_index, inputs in operands.items():
            rerun = _make_rerun(self.calibration.alignments[use_index], matrices, device)
            total += sum(map(rerun, inputs))
        dtype = promote(matrices[0].dtype, jnp.float32)
        return device.put(total.astype(dtype))

    def _read_operand(self, batch: int, use_index: int) -> jax.Array:
        """Returns the other operand of a product with a weight outside of loops, for a batch."""
        value = self.equation.inputs[1 - self.calibration.uses[use_index].operand]
        return self.frame.read(batch, value)

    def _sum_batches(self, sum_up: Callable[..., PyTree], *matrices: jax.Array) -> Iterator[Sums]:
        """Yields the sums of each batch, by index of the use."""
        batches = range(len(self.frame.data))
        if not self.equation.inner_programs:
            programs = {n: compile_at_call(functools.partial(sum_up, n)) for n in self.layers}
            for batch in batches:
                operands = {n: self._read_operand(batch, n) for n in programs}
                yield {n: programs[n](operand, *matrices) for n, operand in operands.items()}
            return
        uses = Uses({use_index: self.calibration.uses[use_index] for use_index in self.layers})
        # Indices are arguments, so that the layers of a stack share a compiled program.
        indices = {use_index: [*layers.values()] for use_index, layers in self.layers.items()}

        def run(inputs: list[jax.Array], indices: PyTree, matrices: PyTree) -> Sums:
            def sum_layer(use_index: int, x: jax.Array, steps: Steps) -> PyTree:
                sums = sum_up(use_index, x, *matrices)
                for scan, layer in zip(self.layers[use_index], indices[use_index], strict=True):
                    is_layer = steps[scan] == layer
                    sums = jax.tree.map(lambda s, is_on=is_layer: jnp.where(is_on, s, 0), sums)
                return sums

            interpreter = SummingInterpreter(uses, sum_layer)
            interpreter.evaluate(self.equation, inputs)
            return interpreter.sums

        program = compile_at_call(jax.jit(run))
        for batch in batches:
            yield program(self.frame.read_inputs(batch, self.equation), indices, matrices)


def _make_rerun(
    alignment: Alignment, matrices: Sequence[jax.Array], device: host.HostDevice
) -> Callable[[jax.Array], np.ndarray]:
    """Returns a function from the other operand of a product to the sums of |y|^2 with each matrix.

    A run outside of `jit` compiles each product by itself, and keeps the program. The product of
    the same inputs with lost weights is this program again: sums of its outputs compile nothing.

    Args:
      alignment: of the product.
      matrices: [*batch, outputs, inputs] each, in the order of the parameter.
      device: the device of matrices and inputs.
    """
    use = alignment.use
    value = use.equation.inputs[use.operand]
    roles = read_product(use.equation).operands[use.operand]
    axes = (*roles.batch, *roles.free, *roles.contracted)
    sizes, order = [value.shape[axis] for axis in axes], np.argsort(axes)
    weights = [
        np.asarray(alignment.to_operand_order(matrix)) for matrix in host.to_numpy(list(matrices))
    ]
    operands = [matrix.astype(value.dtype).reshape(sizes).transpose(order) for matrix in weights]
    operands = device.put([host.copy(matrix) for matrix in operands])

    def sum_batch(x: jax.Array) -> np.ndarray:
        pairs = [[x, w] if use.operand else [w, x] for w in operands]
        outputs = (use.equation.bind(pair)[0] for pair in pairs)
        with np.errstate(all="ignore"):
            return np.array([_sum_squares(np.asarray(y).reshape(-1)) for y in outputs])

    return sum_batch


def _sum_squares(x: np.ndarray) -> float:
    """Returns the sum of x^2 over real numbers, by parts that stay in the caches."""
    return sum(float(np.square(x[chunk]).sum()) for chunk in host.chunks(len(x)))


def _can_rerun(use: Use, matrices: Sequence[jax.Array]) -> bool:
    """Returns whether a product on a CPU takes matrices, and has the precision of sums.

    That is real numbers, in float32 at least.
    """
    equation = use.equation
    dtypes = {value.dtype for value in (*equation.inputs, *equation.outputs)}
    dtypes.update(promote(x.dtype, jnp.float32) for x in matrices)
    precision = equation.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    is_plain = all(x is None or isinstance(x, lax.Precision) for x in precisions)
    is_plain &= matrices[0].size == equation.inputs[use.operand].size
    return is_plain and len(dtypes) == 1 and dtypes <= {np.dtype("float32"), np.dtype("float64")}


def _add_up(batches: Iterable[Sums], name: str) -> Sums:
    """Returns the total of the finite sums of batches.

    Two batches of sums live at once at most: numpy and XLA add in place.
    """
    device: host.HostDevice | None = None
    total: Sums = {}
    for batch, sums in enumerate(batches):
        if not all(map(is_finite, jax.tree.leaves(sums))):
            raise make_not_finite_error(name, batch)
        if total and device is None:
            total = add_in_place(total, sums)
        elif total:
            total = jax.tree.map(_add_on_host, total, host.to_numpy(sums), is_leaf=is_count)
        else:
            is_real = not any(map(jnp.iscomplexobj, jax.tree.leaves(sums)))
            device = host.find_host_device(sums) if is_real else None
            total = sums if device is None else jax.tree.map(host.copy, host.to_numpy(sums))
    return total if device is None else device.put(total)


def _add_on_host(total: PyTree, sums: PyTree) -> PyTree:
    """Adds a count, or an array of real floats in place, with the bits of XLA:CPU."""
    if is_count(total):
        return total + sums
    flat, terms = total.reshape(-1), sums.reshape(-1)
    for chunk in host.chunks(len(flat)):
        added = host.flush_subnormals(flat[chunk]) + host.flush_subnormals(terms[chunk])
        flat[chunk] = host.flush_subnormals(added)
    return total
