"""Pruning at initialization: chooses weights once, before training.

`snip_scores`, `grasp_scores` and `synflow_scores` score weights. `prune_at_init` ranks the scores
of all leaves together and creates masks for `wrap_optax(tx, masks=masks)`. SNIP is also an updater,
which prunes by the gradient of the first batch.

Sources: SNIP, Lee et al. 2018, "SNIP: single-shot network pruning based on connection sensitivity",
equation 5; GraSP, Wang et al. 2020, "Picking winning tickets before training by preserving gradient
flow", equation 8; SynFlow, Tanaka et al. 2020, "Pruning neural networks without any data by
iteratively conserving synaptic flow", algorithm 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp

from sparsity.algorithms.pruners import SaliencyPruning
from sparsity.core import checks, trees
from sparsity.core.arrays import multiply, promote
from sparsity.core.names import Registry
from sparsity.core.trees import Masks, Params, PyTree, ScoreTree, Sparsities, Tree
from sparsity.masks import Global, Scope, Sites, adapt_scope, apply_masks, are_ones
from sparsity.masks.distributions import Uniform
from sparsity.patterns import Unstructured
from sparsity.selection import global_topk_mask, num_kept
from sparsity.sparsity_schedules import OneShotSchedule, PolynomialSchedule, Schedule
from sparsity.training.hooks import StepInputs
from sparsity.training.state import SparseState

LossFn: TypeAlias = Callable[[PyTree, PyTree], jax.Array]  # of params and a batch


@dataclasses.dataclass(kw_only=True)
class SnipPruning(SaliencyPruning):
    """Keeps the weights with the largest |weight * gradient| of one step; the masks then stay.

    By default this is the first step, before any training, as in the source. Masks that already
    prune, such as those of `wrap_optax(tx, masks=masks)`, stay as well.

    Source: Lee et al. 2018, "SNIP", equation 5.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 2))}
      >>> grads = {"a": jnp.array([[4.0, 3.0]]), "b": jnp.array([[2.0, 1.0]])}
      >>> pruner = SnipPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params, grads)[1].items()}
      {'a': [[1, 1]], 'b': [[0, 0]]}
    """

    scheduler: Schedule = OneShotSchedule(0)
    scope: Scope = Global(use_normalization=False)

    schedule_type: ClassVar[str] = "one_shot"

    def check_fields(self) -> None:
        super().check_fields()
        if isinstance(self.scheduler, PolynomialSchedule):
            raise ValueError(
                f"{type(self).__name__} prunes once, got scheduler = {self.scheduler!r}. Give it "
                "OneShotSchedule(step), or use SaliencyPruning with "
                "scope=Global(use_normalization=False), which follows a ramp."
            )

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        pruned = super().new_masks(sparse_state, inputs)
        is_first = are_ones(sparse_state.masks)
        return trees.map_matched(
            lambda _, mask, old: None if old is None else jnp.where(is_first, mask, old),
            pruned,
            sparse_state.masks,
        )


def snip_scores(loss_fn: LossFn, params: Params, batches: Iterable[PyTree]) -> ScoreTree:
    """Scores weights by their effect on the loss: |weight * mean gradient|.

    Args:
      loss_fn: `loss_fn(params, batch)` is the loss of a batch, a scalar.
      params: tree of parameters.
      batches: any trees of arrays, which count equally; read once.

    Returns:
      A tree like `params`, `None` for leaves that are not floating.

    Raises:
      ValueError: the loss is no real floating-point scalar, or there is no batch.

    Source: Lee et al. 2018, "SNIP", equation 5.

    Example:
      >>> loss_fn = lambda params, x: jnp.sum(params["w"] * x) ** 2
      >>> snip_scores(loss_fn, {"w": jnp.array([1.0, -2.0])}, [jnp.array([3.0, 1.0])])
      {'w': Array([6., 4.], dtype=float32)}
    """
    weights = trees.prunable(params)
    grads = _average_over(_make_gradient(loss_fn, params), [weights], batches)
    return jax.tree.map(lambda w, g: jnp.abs(multiply(w, g)), weights, grads)


def grasp_scores(loss_fn: LossFn, params: Params, batches: Iterable[PyTree]) -> ScoreTree:
    """Scores weights by their share of the gradient flow: weight * (H @ g), of the mean loss.

    H is the Hessian and g the gradient. Removing a weight lowers the squared norm of the gradient
    by twice its score, to first order, so that the largest scores stay. The source ranks
    -weight * (H @ g) and removes the largest. Its code divides logits by a temperature of 200; this
    function has no temperature.

    Args:
      loss_fn: as in `snip_scores`.
      params: tree of parameters.
      batches: as in `snip_scores`, but held in memory and read twice.

    Returns:
      A tree as `snip_scores` returns it, of signed scores.

    Raises:
      ValueError: as in `snip_scores`.

    Source: Wang et al. 2020, "Picking winning tickets before training" (GraSP), equation 8.

    Example:
      >>> loss_fn = lambda params, x: jnp.sum(params["w"] ** 2 * x)  # H = 2 x, g = 2 w x
      >>> grasp_scores(loss_fn, {"w": jnp.array([1.0, -2.0])}, [jnp.array([1.0, -1.0])])
      {'w': Array([ 4., 16.], dtype=float32)}
    """
    checks.check_iterable("batches", batches)
    batches = list(batches)
    weights = trees.prunable(params)
    gradient = _make_gradient(loss_fn, params)
    # jax conjugates gradients by complex weights.
    direction = jax.tree.map(jnp.conj, _average_over(gradient, [weights], batches))

    def multiply_by_hessian(weights: Params, direction: PyTree, batch: PyTree) -> PyTree:
        # H g by forward derivatives of the gradient; H itself is never stored.
        batch_gradient = functools.partial(gradient, batch=batch)
        return jax.jvp(batch_gradient, (weights,), (direction,))[1]

    hessian_products = _average_over(multiply_by_hessian, [weights, direction], batches)
    return jax.tree.map(lambda w, h: jnp.real(multiply(w, h)), weights, hessian_products)


def synflow_scores(
    fn: Callable[[PyTree, PyTree], PyTree], params: Params, inputs: PyTree
) -> ScoreTree:
    """Scores weights by the flow through them, from inputs of ones to the sum of the outputs.

    The score is |weight| times the derivative of the sum of all outputs by |weight|. Without
    biases, the scores of each layer sum to the output. The scores depend on no data.

    Args:
      fn: `fn(params, inputs)` returns outputs, any tree of arrays.
      params: tree of parameters; the absolute values of all of them are used.
      inputs: tree of arrays or of `jax.ShapeDtypeStruct`; ones replace floating values, integers
        (tokens) stay. One example is enough.

    Returns:
      A tree like `params`, `None` for leaves that are not floating.

    Source: Tanaka et al. 2020, "Pruning neural networks without any data" (SynFlow), algorithm 1.

    Example:
      >>> fn = lambda params, x: x @ params["w"]
      >>> synflow_scores(fn, {"w": jnp.array([[1.0], [-2.0]])}, jnp.zeros((1, 2)))
      {'w': Array([[1.],
             [2.]], dtype=float32)}
    """
    checks.check_function("fn", fn, "(params, inputs)")
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype) if trees.is_prunable(x) else x, inputs)
    magnitudes = jax.tree.map(jnp.abs, trees.prunable(params))

    def sum_outputs(magnitudes: PyTree, inputs: PyTree) -> jax.Array:
        outputs = fn(_replace_weights(params, magnitudes), inputs)
        output_sums, zero = [jnp.sum(x) for x in jax.tree.leaves(outputs)], jnp.zeros(())
        dtype = promote(zero.dtype, *(x.dtype for x in output_sums))
        return sum((x.astype(dtype) for x in output_sums), zero.astype(dtype))

    # R is the sum of the outputs; the score is |w| x dR / d|w|.
    gradients = jax.grad(sum_outputs)(magnitudes, ones)
    return jax.tree.map(multiply, magnitudes, gradients)


def prune_at_init(
    name: Literal["snip", "grasp", "synflow"],
    params: Tree,
    sparsity: float,
    *,
    loss_fn: LossFn | None = None,
    fn: Callable[[PyTree, PyTree], PyTree] | None = None,
    batches: Iterable[PyTree] | None = None,
    inputs: PyTree | None = None,
    rounds: int = 100,
) -> tuple[Tree, Masks]:
    """Prunes by the scores of 'snip', 'grasp' or 'synflow', all matrices and kernels together.

    Args:
      name: name of the scores.
      params: tree of parameters; those with one axis stay dense.
      sparsity: fraction of the weights to remove, in [0, 1].
      loss_fn: argument of 'snip' and 'grasp'.
      fn: argument of 'synflow'.
      batches: argument of 'snip' and 'grasp'.
      inputs: argument of 'synflow'.
      rounds: argument of 'synflow', which prunes to density (1 - sparsity)^(r / rounds) in round r
        and scores again; pruned weights never return.

    Returns:
      (pruned params, masks), the masks `None` for parameters that stay dense.

    Raises:
      ValueError: the name is not known, a function or data is missing, or the scores of a parameter
        are not finite or all equal. The message names the parameter.

    Example:
      >>> import optax, sparsity
      >>> params = {"w": jnp.array([[1.0, -2.0], [3.0, -4.0]]), "b": jnp.zeros(2)}
      >>> model = lambda params, x: x @ params["w"] + params["b"]
      >>> pruned, masks = prune_at_init("synflow", params, 0.5, fn=model, inputs=jnp.ones((1, 2)))
      >>> masks["w"]
      Array([[0, 0],
             [1, 1]], dtype=uint8)
      >>> pruner = sparsity.StaticRandomSparse()  # `static_sparse` trains within these masks
      >>> opt_state = pruner.wrap_optax(optax.adam(1e-3), masks=masks).init(pruned)
    """
    checks.check_fraction("sparsity", sparsity)
    checks.check_int("rounds", rounds, 1)
    scores_fn, argument_names = _SCORES.find(name)
    sources = {"loss_fn": loss_fn, "batches": batches, "fn": fn, "inputs": inputs}
    function, data = (sources[key] for key in argument_names)
    if missing := [key for key in argument_names if sources[key] is None]:
        required = " and ".join(argument_names)
        raise ValueError(f"{name!r} scores weights by {required}, got {missing[0]} = None.")
    score = functools.partial(scores_fn, function)
    scores = score(params, data)
    _check_scores(name, scores, Uniform(sparsity)(params))
    if name == "synflow":
        masks = _prune_in_rounds(score, params, inputs, sparsity, rounds)
    else:
        masks = _select_globally(scores, sparsity)
    return apply_masks(params, masks), masks


def _select_globally(scores: ScoreTree, sparsity: chex.Numeric) -> Masks:
    """Returns the masks of the highest scores of all selected leaves together."""
    scope, sites = Global(use_normalization=False), Sites(scores, Unstructured())
    return adapt_scope(scope, sites).select_tree(scores, Uniform(sparsity)(scores))


def _prune_in_rounds(
    score: Callable[..., PyTree], params: Params, inputs: PyTree, sparsity: float, rounds: int
) -> PyTree:
    """Returns the masks after rounds that score the kept weights again and prune more."""
    weights = trees.prunable(params)
    masks = make_ones(weights, sparsity)
    total = sum(mask.size for mask in jax.tree.leaves(masks))

    def prune(masks: Masks, sparsity: jax.Array) -> tuple[PyTree, None]:
        scores = score(_replace_weights(params, apply_masks(weights, masks)), inputs)
        return mask_highest(masks, scores, num_kept(total, sparsity)), None

    # The last sparsity is the argument itself, without the rounding of a power.
    sparsities = [1 - (1 - sparsity) ** (r / rounds) for r in range(1, rounds)]
    return jax.lax.scan(prune, masks, jnp.array([*sparsities, sparsity], jnp.float32))[0]


def make_ones(params: Params, sparsity: float) -> Masks:
    """Returns masks of ones for all matrices and kernels, `None` for parameters with one axis."""
    return trees.map_matched(
        lambda _, x, target: None if target is None else jnp.ones_like(x, jnp.uint8),
        params,
        Uniform(sparsity)(params),
    )


def mask_highest(masks: Masks, scores: ScoreTree, num_weights: chex.Numeric) -> Masks:
    """Returns the masks of the highest scores of all leaves, among the weights that masks keep.

    Args:
      masks: tree of the current masks, `None` for leaves that stay dense.
      scores: tree of real scores of any sign; scores of leaves without a mask do not count.
      num_weights: number of weights to keep.
    """
    ranked = trees.map_matched(
        lambda _, score, mask: None if mask is None else score, scores, masks
    )
    if not jax.tree.leaves(ranked):
        return masks
    dtype = promote(*(score.dtype for score in jax.tree.leaves(ranked)))
    ranked = jax.tree.map(lambda score: score.astype(dtype), ranked)
    return global_topk_mask(ranked, num_weights, where=masks)


# Functions by name, each with the arguments of `prune_at_init` that it takes, without `params`.
_SCORES: Registry[tuple[Callable[..., PyTree], tuple[str, str]]] = Registry(
    "name",
    {
        "snip": (snip_scores, ("loss_fn", "batches")),
        "grasp": (grasp_scores, ("loss_fn", "batches")),
        "synflow": (synflow_scores, ("fn", "inputs")),
    },
)


def _check_scores(name: str, scores: ScoreTree, targets: Sparsities) -> None:
    """Raises a ValueError that names a leaf to prune whose scores are equal or not finite."""

    def check(path: trees.KeyPath, score: jax.Array, target: chex.Numeric | None) -> None:
        if target is None or checks.is_traced(score):
            return
        role = f"The {name} scores of {trees.path_string(path)!r}"
        if not bool(jnp.all(jnp.isfinite(score))):
            raise ValueError(
                f"{role} are not all finite. Look for NaN in the parameters and the data, or scale "
                "the model down; jax.config.update('jax_enable_x64', True) widens the range."
            )
        if score.size > 1 and bool(jnp.min(score) == jnp.max(score)):
            raise ValueError(
                f"{role} are all {float(jnp.min(score))} and rank nothing. Does the leaf "
                "take part in the output, and is it initialized to values that differ?"
            )

    trees.map_matched(check, scores, targets)


def _make_gradient(loss_fn: LossFn, params: Params) -> Callable[..., PyTree]:
    """Returns the gradient of the loss as a function of the floating leaves and a batch."""

    checks.check_function("loss_fn", loss_fn, "(params, batch)")

    def loss(weights: Params, batch: PyTree) -> jax.Array:
        value = loss_fn(_replace_weights(params, weights), batch)
        checks.check_loss("loss_fn", value)
        return value

    return jax.grad(loss)


def _replace_weights(params: Params, weights: Params) -> Params:
    """Returns the parameters with their floating leaves replaced."""
    return trees.map_matched(lambda _, old, new: old if new is None else new, params, weights)


def _average_over(
    fn: Callable[..., PyTree], args: list[PyTree], batches: Iterable[PyTree]
) -> PyTree:
    """Returns the mean of fn(*args, batch) over the batches, summed in at least float32."""

    @jax.jit
    def add(total: PyTree | None, args: list[PyTree], batch: PyTree) -> PyTree:
        terms = jax.tree.map(lambda x: x.astype(promote(x.dtype, jnp.float32)), fn(*args, batch))
        return terms if total is None else jax.tree.map(jnp.add, total, terms)

    checks.check_iterable("batches", batches)
    total, count = None, 0
    for batch in batches:
        total, count = add(total, args, batch), count + 1
    if not count:
        raise ValueError("batches is empty: pass at least one. An iterator can be read only once.")
    return jax.tree.map(lambda x, like: (x / count).astype(like.dtype), total, args[0])
