"""A dry run gives the bytes of a run from shapes: worked by hand, and against a real process."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import sparsity
from sparsity.calibration import Estimate

ROOT = pathlib.Path(__file__).parents[2]


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


PARAMS = {"up": shape(100, 400), "down": shape(400, 10)}
BATCHES = [shape(1000, 100)] * 2
WANDA = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
# Kernels of 160,000 and 16,000 bytes, twice, and masks of 40,000 and 4,000.
MODEL = 2 * 176_000 + 44_000
INPUTS, HIDDEN, OUTPUTS = 2 * 400_000, 2 * 1_600_000, 2 * 40_000  # of both batches


def estimate(pruner, *refit):
    return sparsity.oneshot(pruner, mlp, PARAMS, BATCHES, *refit, estimate=True)


def test_bytes_are_those_of_the_shapes():
    # The loss of `up`, for one batch: inputs, outputs and their squares, and six arrays of weights.
    work = 400_000 + 2 * 1_600_000 + 6 * 160_000
    now = 176_000 + 160_000 + 40_000 + INPUTS + work
    # Of `down`: its input and the square, beside the activations of both batches.
    later = MODEL + INPUTS + HIDDEN + 2 * 1_600_000 + 6 * 16_000
    assert later > now
    assert estimate(WANDA) == Estimate(MODEL, INPUTS + HIDDEN, 0, later, "down")


def test_gram_matrices_count_as_often_as_a_method_holds_them():
    # 400 x 400 for `down`; sums need the rows of a batch and two matrices.
    gram, weights, rows = 640_000, 6 * 16_000, 1_600_000
    held = MODEL + INPUTS + HIDDEN
    admm = Estimate(MODEL, INPUTS + HIDDEN, gram, held + rows + 2 * gram, "down")
    assert estimate(WANDA, sparsity.ADMM()) == admm
    # A layer of few rows: what the solution holds is more than the sums.
    few, held = [shape(10, 100)] * 2, MODEL + (INPUTS + HIDDEN) // 100
    gpt = sparsity.SparseGPTPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    for pruner, refit, count in ((gpt, None, 2), (WANDA, sparsity.ADMM(), 2)):
        needed = sparsity.oneshot(pruner, mlp, PARAMS, few, refit, estimate=True)
        assert needed.peak == held + count * gram + weights


def test_a_refit_may_count_the_bytes_of_its_solution():
    class Refit:
        def __call__(self, dense, pruned, mask, statistic, select):
            return pruned, mask

        def count_bytes(self, outputs, inputs):
            return 10**9 if (outputs, inputs) == (10, 400) else 0  # beside one Gram matrix

    few, held = [shape(10, 100)] * 2, MODEL + (INPUTS + HIDDEN) // 100
    needed = sparsity.oneshot(WANDA, mlp, PARAMS, few, Refit(), estimate=True)
    assert needed.peak == held + 640_000 + 10**9 + 6 * 16_000


def test_layers_of_a_scan_count_once_beside_their_stack():
    def scanned(params, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]

    params, batches = shape(7, 50, 50), [shape(1000, 50)]
    deep = sparsity.oneshot(WANDA, scanned, params, batches, estimate=True)
    shallow = sparsity.oneshot(WANDA, scanned, shape(2, 50, 50), batches, estimate=True)
    assert deep.model == 9 * 7 * 2500
    assert deep.peak - shallow.peak == 9 * 5 * 2500
    assert deep.parameter == "params"


def test_a_convolution_counts_its_patches():
    def model(params, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, params, (1, 1), "SAME", dimension_numbers=dims)

    params, batch = shape(3, 3, 8, 16), shape(2, 20, 20, 8)
    answer = sparsity.oneshot(WANDA, model, params, [batch], sparsity.ADMM(), estimate=True)
    patches, gram, leaf = 2 * 400 * 72 * 4, 72 * 72 * 4, 9 * 8 * 16
    assert answer.gram == gram
    assert answer.peak == 9 * leaf + 2 * 400 * 8 * 4 + patches + 2 * gram


def test_values_between_products_set_the_peak_by_no_parameter_s_name():
    def model(params, x):
        wide = jnp.broadcast_to(x[..., None], (*x.shape, 1000)) * 2.0
        return wide.sum(-1) @ params["w"]

    answer = sparsity.oneshot(WANDA, model, {"w": shape(20, 4)}, [shape(10, 20)], estimate=True)
    assert answer.peak > 2 * 10 * 20 * 1000 * 4
    assert answer.parameter == ""
    assert repr(answer).endswith("MB between products)")


def test_an_estimate_reads_in_megabytes_and_needs_a_sequential_run():
    assert repr(estimate(WANDA)).startswith(
        "Estimate(model 0.4 MB, activations 4.0 MB, gram 0.0 MB;"
    )
    with pytest.raises(ValueError, match="got sequential = False"):
        sparsity.oneshot(WANDA, mlp, PARAMS, BATCHES, sequential=False, estimate=True)


MEASURE = """
import ctypes, gc, warnings
import jax, jax.numpy as jnp, numpy as np, sparsity

def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) / shape[-2], jnp.float32)

def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]

def network(params, x):
    dims = ("NHWC", "HWIO", "NHWC")
    for w in (params["first"], params["second"]):
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(x)
    return x.mean((1, 2)) @ params["last"]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

warnings.simplefilter("ignore")
wanda = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
cases = {
    "mlp": (mlp, {"up": draw(256, 2048), "down": draw(2048, 64)}, [draw(8192, 256)] * 3, None),
    "network": (
        network,
        {"first": draw(3, 3, 4, 32), "second": draw(3, 3, 32, 32), "last": draw(32, 4)},
        [draw(32, 32, 32, 4)] * 3,
        sparsity.ADMM(iterations=1),
    ),
}
for name, (model, params, batches, refit) in cases.items():
    bytes_ = sparsity.oneshot(wanda, model, params, batches, refit, estimate=True).peak
    sparsity.oneshot(wanda, model, params, batches, refit)  # compiles
    gc.collect(), ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident() - sum(x.nbytes for x in (*params.values(), *batches))
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is the present
    sparsity.oneshot(wanda, model, params, batches, refit)
    (peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(name, bytes_, 1024 * int(peak.split()[1]) - before, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory of Linux")
def test_a_process_needs_what_was_estimated():
    """Within 40 %: allocators differ, and so do the buffers of compiled programs."""
    run = [sys.executable, "-c", MEASURE]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        _, estimated, measured = line.split()
        assert 1 / 1.4 <= int(estimated) / int(measured) <= 1.4, line
