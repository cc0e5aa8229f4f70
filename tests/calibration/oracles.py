"""Layers to prune, and plain numpy programs of what the calibration computes, in float64.

Matrices are [outputs, inputs]; kernels, as the library gets them, [inputs, outputs].
"""

import jax.numpy as jnp
import numpy as np

import sparsity
from tests import helpers, selection_oracle


def layer(inputs=24, outputs=16, rows=96, rank=8, seed=0, dtype=np.float64):
    """A weight matrix and inputs that are correlated, of scales that differ, as real ones are."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(rank, inputs)) / np.sqrt(rank)
    scales = np.exp(0.6 * rng.normal(size=inputs))

    def draw():
        noise = 0.3 * rng.normal(size=(rows, inputs))
        return ((rng.normal(size=(rows, rank)) @ mix + noise) * scales).astype(dtype)

    weights = rng.normal(size=(outputs, inputs)).astype(dtype)
    return weights, draw(), draw()


def make_statistic(x, **fields):
    """The statistic of a kernel [inputs, outputs] that x[rows, inputs] is multiplied with."""
    values = {"contracting": (0,), "output": (1,), "count": len(x)} | fields
    return sparsity.Statistic(
        gram=jnp.asarray(x.T @ x), squares=jnp.asarray((x**2).sum(0)), **values
    )


def error(x, difference):
    """Sums of squares of the outputs, of each output."""
    return ((x @ difference.T) ** 2).sum(0)


def wanda(weights, squares, sparsity_):
    """|w| sqrt(squares), the best of each output; ties go to the lower input."""
    scores = np.abs(weights) * np.sqrt(squares)
    kept = helpers.num_kept(weights.shape[1], sparsity_)
    return np.stack([selection_oracle.best(row, kept) for row in scores])


def ria(weights, squares, sparsity_):
    """Relative importance x fourth root of the squares, the best of the layer."""
    w = np.abs(weights)
    scores = (w / w.sum(1, keepdims=True) + w / w.sum(0)) * squares**0.25
    return selection_oracle.best(scores, helpers.num_kept(w.size, sparsity_))


def damped(gram, damping=0.01):
    """The Gram matrix that SparseGPT inverts."""
    live = np.diag(gram) > 0
    return gram + np.diag(damping * np.diag(gram)[live].mean() + ~live)


def sparsegpt(weights, gram, sparsity_=None, nm=None, block=128, group=None):
    """Column by column: weights and mask."""
    w, (outputs, inputs) = weights.copy(), weights.shape
    w[:, np.diag(gram) == 0] = 0
    upper = np.linalg.cholesky(np.linalg.inv(damped(gram))).T
    mask, kept = np.zeros((outputs, inputs), np.uint8), 0
    for j in range(inputs):
        if group and j % block == 0:
            end = min(j + block, inputs)
            through = helpers.num_kept(end, sparsity_)
            scores = (w[:, j:end] / np.diag(upper)[j:end]) ** 2
            for first in range(0, outputs, group):
                total = scores[first : first + group].sum(0)
                mask[first : first + group, j:end] = selection_oracle.best(total, through - kept)
            kept = through
        elif nm is None and group is None and j % block == 0:
            end = min(j + block, inputs)
            scores = (w[:, j:end] / np.diag(upper)[j:end]) ** 2
            through = helpers.num_kept(outputs * end, sparsity_)
            # Ties go to the lower index of the kernel, whose rows are inputs.
            mask[:, j:end] = selection_oracle.best(scores.T, through - kept).T
            kept = through
        if nm is not None and j % nm[1] == 0:
            end = j + nm[1]
            scores = (w[:, j:end] / np.diag(upper)[j:end]) ** 2
            mask[:, j:end] = [selection_oracle.best(row, nm[0]) for row in scores]
        lost = np.where(mask[:, j], 0, w[:, j]) / upper[j, j]
        w[:, j:] -= np.outer(lost, upper[j, j:])
        w[mask[:, j] == 0, j] = 0
    return w, mask


def least_squares(weights, mask, gram):
    """Normal equations of each output."""
    new = np.zeros_like(weights)
    for row, kept, target in zip(new, mask > 0, weights @ gram, strict=True):
        row[kept] = np.linalg.solve(gram[np.ix_(kept, kept)], target[kept])
    return new


def admm(
    weights, gram, mask, iterations=20, gradual=0, sparsity_=None, rho=1.0, damping=0.1, nm=None
):
    """Boza 2024, algorithms 1 and 2; the mask is found in the layer, or n of m of each output."""
    norms = np.sqrt(np.diag(gram))
    hessian = gram / np.outer(norms, norms) + damping * np.eye(len(gram))
    w = weights * norms
    targets, duals = w @ hessian, np.zeros_like(w)
    for i in range(iterations):
        if i < gradual and nm:
            groups = np.abs(w + duals).reshape(-1, nm[1])
            mask = np.stack([selection_oracle.best(row, nm[0]) for row in groups]).reshape(w.shape)
        elif i < gradual:
            share = 1 - (1 - (i + 1) / gradual) ** 3
            kept = helpers.num_kept(w.size, share * sparsity_)
            mask = selection_oracle.best(np.abs(w + duals).T, kept).T
        sparse = np.where(mask, w + duals, 0)
        duals = duals + w - sparse
        w = np.linalg.solve(
            hessian + rho * np.eye(len(gram)), (targets + rho * (sparse - duals)).T
        ).T
    return np.where(mask, w + duals, 0) / norms, mask
