"""Places where a run reaches a weight, and the sums of its inputs or outputs there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.run.frames import Frame, Layers
from sparsity.calibration.statistics.capture import Calibration
from sparsity.calibration.statistics.checks import is_finite, not_finite
from sparsity.calibration.statistics.losses import make_rerun
from sparsity.calibration.statistics.rows import sum_outputs
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.summing import Steps, SummingInterpreter, Sums, add, is_count
from sparsity.core import host, sharding
from sparsity.core.dtypes import promote
from sparsity.core.trees import PyTree
from sparsity.programs.program import Equation
from sparsity.programs.share import share_at_call


@dataclasses.dataclass(frozen=True)
class ReachedWeight:
    """Place where the program reaches a weight: a product, or the loop or branch around it.

    Attributes:
      calibration: sums up inputs.
      frame: holds the inputs of the equation.
      equation: a product, a scan or a cond.
      layers: the layers of the scans within the equation that take the weight apart, by number of
        the use; all uses read the weight along the same axes.
    """

    calibration: Calibration
    frame: Frame
    equation: Equation
    layers: Mapping[int, Layers]

    def statistic(self, name: str) -> Statistic:
        """Returns the statistic of the inputs in all batches, and in all steps of a loop.

        Raises:
          ValueError: inputs are not finite; the error names the batch.
        """
        total = _add_up(self._sums(self.calibration.sum_up), name)
        statistics = [
            self.calibration.statistic(number, total[number], one_layer=True)
            for number in sorted(total)
        ]
        return functools.reduce(add, statistics)

    def losses(self, *matrices: jax.Array) -> jax.Array:
        """Returns the sums of |y|^2 over the outputs y of each matrix."""
        rerun_losses = self._rerun(matrices)
        if rerun_losses is not None:
            return rerun_losses

        def sum_use(number: int, x: jax.Array, steps: Steps, arguments: PyTree) -> jax.Array:
            use, alignment = self.calibration.uses[number], self.calibration.alignments[number]
            return sharding.replicated(
                functools.partial(sum_outputs, use, alignment), x, *arguments
            )

        sums = [total for each in self._sums(sum_use, matrices) for total in each.values()]
        total: jax.Array = functools.reduce(jnp.add, sums)
        return total

    def _rerun(self, matrices: Sequence[jax.Array]) -> jax.Array | None:
        """Returns the losses by programs that the run needs anyway; `None` if there are none."""
        if self.equation.bodies:
            return None
        xs = {number: self._operands(number) for number in self.layers}
        place = host.find_place(xs, matrices)
        if place is None:
            return None
        total = np.zeros(len(matrices))
        for number, inputs in xs.items():
            use, alignment = self.calibration.uses[number], self.calibration.alignments[number]
            rerun = make_rerun(use, alignment, matrices, place)
            if rerun is None:
                return None
            total += sum(map(rerun, inputs))
        dtype = promote(matrices[0].dtype, jnp.float32)
        losses: jax.Array = place.put(total.astype(dtype))
        return losses

    def _operands(self, number: int) -> list[jax.Array]:
        """Returns what a product outside of loops multiplies by its weight, for each batch."""
        value = self.equation.inputs[1 - self.calibration.uses[number].operand]
        return [self.frame.read(batch, value) for batch in range(len(self.frame.data))]

    def _sums(self, sum_up: Callable[..., PyTree], arguments: PyTree = ()) -> Iterator[Sums]:
        """Yields the sums of each batch, by number of the use."""
        batches = range(len(self.frame.data))
        if not self.equation.bodies:
            xs = {number: self._operands(number) for number in self.layers}
            compiled = {
                number: share_at_call(lambda x, more, number=number: sum_up(number, x, {}, more))
                for number in xs
            }
            for batch in batches:
                yield {number: compiled[number](x[batch], arguments) for number, x in xs.items()}
            return
        uses = {number: self.calibration.uses[number] for number in self.layers}
        # Indices are arguments, so that the layers of a stack share what is compiled.
        indices = {number: [*layers.values()] for number, layers in self.layers.items()}

        def run(inputs: list[jax.Array], indices: PyTree, arguments: PyTree) -> Sums:
            def sum_layer(number: int, x: jax.Array, steps: Steps) -> PyTree:
                sums = sum_up(number, x, steps, arguments)
                for scan, layer in zip(self.layers[number], indices[number], strict=True):
                    is_layer = steps[scan] == layer
                    sums = jax.tree.map(lambda s, on=is_layer: jnp.where(on, s, 0), sums)
                return sums

            interpreter = SummingInterpreter(uses, sum_layer)
            interpreter.evaluate(self.equation, inputs)
            return interpreter.sums

        program = share_at_call(jax.jit(run))
        for batch in batches:
            yield program(self.frame.inputs(batch, self.equation), indices, arguments)


def _add_up(batches: Iterable[Sums], name: str) -> Sums:
    """Returns the total of the finite sums of batches.

    Two batches of sums live at once at most: numpy and XLA add in place.
    """
    place: host.HostPlace | None = None
    total: Sums = {}
    for batch, sums in enumerate(batches):
        if not all(map(is_finite, jax.tree.leaves(sums))):
            raise not_finite(name, batch)
        if total and place is None:
            total = _add(total, sums)
        elif total:
            total = jax.tree.map(_add_on_host, total, host.to_numpy(sums), is_leaf=is_count)
        else:
            is_real = not any(map(jnp.iscomplexobj, jax.tree.leaves(sums)))
            place = host.find_place(sums) if is_real else None
            total = sums if place is None else jax.tree.map(host.copy, host.to_numpy(sums))
    return total if place is None else place.put(total)


def _add_on_host(total: PyTree, sums: PyTree) -> PyTree:
    return total + sums if is_count(total) else host.add_to(total, sums)


_add = jax.jit(add, donate_argnums=0)
