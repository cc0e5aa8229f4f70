"""What can be cut from well-known networks: channels of torchvision, timm, flax and plain JAX.

Each network has random weights. It is traced, cut to half of its multiply-adds by whole channels,
and compared with the masked network. A second table counts the networks that meet each reason of
`graph.refused`. Needs PyTorch, its networks, and flax:

    pip install torch torchvision timm torchax torch-pruning flax
    python -m benchmarks.gallery [--trace] [--pruning] [name ...]

torchax 0.0.13 names operators that torch 2.14 no longer has: take an older torch.
--trace stops before the cut. --pruning compares numbers of parameters with torch-pruning.
"""

from __future__ import annotations

import argparse
import collections
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import timm
import torch
import torch_pruning
import torchax
import torchvision
from flax import nnx

import sparsity
from benchmarks.results import table
from sparsity.graph import Refusal

TORCHVISION = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn",
    "vit_b_16", "wide_resnet50_2",
]  # fmt: skip
TIMM = [
    "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "convit_tiny", "convnextv2_atto",
    "crossvit_tiny_240", "cspresnet50", "deit_tiny_patch16_224", "dla34", "edgenext_xx_small",
    "efficientformer_l1", "eva02_tiny_patch14_224", "ghostnet_100", "gmlp_ti16_224",
    "hrnet_w18_small", "levit_128s", "mixer_s32_224", "mobilevit_xxs", "nfnet_l0", "pit_ti_224",
    "poolformer_s12", "repvgg_a0", "res2net50_26w_4s", "resmlp_12_224", "resnest14d", "seresnet50",
    "tnt_s_legacy_patch16_224", "visformer_tiny", "vit_base_patch32_siglip_gap_256",
    "xcit_nano_12_p16_224",
]  # fmt: skip
HEAD = ["network", "groups", "streams", "refused", "seconds", "MACs", "error"]
WIDTH, TOKENS = 64, jnp.arange(12)[None]


class Network(NamedTuple):
    """A network `fn(params, x)`."""

    fn: Callable[..., Any]
    params: Any
    x: jax.Array


def make_module(name: str) -> tuple[torch.nn.Module, int]:
    """Returns a network of torchvision or timm with random weights, and the size of images."""
    torch.manual_seed(0)
    if name in TIMM:
        module = timm.create_model(name, num_classes=1000)
        return module.eval(), module.default_cfg["input_size"][-1]
    size = 224 if name in ("maxvit_t", "swin_v2_t", "vit_b_16") else 128
    return torchvision.models.get_model(name, weights=None).eval(), size


def open_torch(name: str) -> Network:
    """Returns a network of PyTorch by torchax."""
    module, size = make_module(name)
    params, fn = torchax.extract_jax(module)
    image = jax.random.normal(jax.random.key(1), (1, 3, size, size))
    return Network(lambda params, x: fn(params, (x,)), params, image)


class Transformer(nn.Module):
    """A transformer of flax linen."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(50, WIDTH)(tokens) + self.param("positions", nn.zeros_init(), (12, WIDTH))
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(50)(nn.LayerNorm()(x))


class ConvNet(nnx.Module):
    """A convolutional network of flax nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, WIDTH, (3, 3), rngs=rngs)
        self.up = nnx.Conv(WIDTH, 2 * WIDTH, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs, use_running_average=True)
        self.down = nnx.Conv(2 * WIDTH, WIDTH, (3, 3), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        x += self.down(nnx.relu(self.norm(self.up(x))))
        return self.head(x.mean((1, 2)))


def run_layers(params: Any, tokens: jax.Array) -> jax.Array:
    """Runs a language model whose layers are a scan."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]
        return x + jax.nn.silu(y @ p["up"]) @ p["down"], None

    return jax.lax.scan(layer, params["embed"][tokens], params["layers"])[0] @ params["embed"].T


def open_jax(name: str) -> Network:
    """Returns one of the networks of `JAX`."""
    keys = jax.random.split(jax.random.key(0))
    if name == "linen transformer":
        return Network(Transformer().apply, Transformer().init(keys[0], TOKENS), TOKENS)
    if name == "nnx convolutions":
        definition, params = nnx.split(ConvNet(nnx.Rngs(0)))
        image = jax.random.normal(keys[0], (1, 16, 16, 3))
        return Network(lambda params, x: nnx.merge(definition, params)(x), params, image)
    shapes = {"norm": (4, WIDTH), "up": (4, WIDTH, 256), "down": (4, 256, WIDTH)}
    layers = {name: jax.random.normal(keys[0], shape) for name, shape in shapes.items()}
    embed = jax.random.normal(keys[1], (50, WIDTH))
    return Network(run_layers, {"embed": embed, "layers": layers}, TOKENS)


JAX = ["linen transformer", "nnx convolutions", "scanned language model"]


def vary(x: jax.Array) -> jax.Array:
    """Returns a parameter that is not constant, as scales of 1 are, behind which faults hide."""
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size or x.min() != x.max():
        return x
    low, high = (-0.1, 0.1) if x.min() == 0 else (0.5, 1.5)
    return jnp.asarray(np.random.default_rng(x.size).uniform(low, high, x.shape), x.dtype)


def cut(network: Network, graph: sparsity.Graph) -> list[str]:
    """Returns the share of multiply-adds that a cut leaves, and its relative error."""
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph), sparsity_distribution_fn=sparsity.budget(graph, macs=0.5)
    )
    masked, masks = pruner.instant_sparsify(jax.tree.map(vary, network.params))
    small = sparsity.shrink(graph, masked, masks)
    options = {"xla_llvm_disable_expensive_passes": True}  # compiles faster
    outputs = [
        jax.tree.leaves(jax.jit(fn, compiler_options=options)(params, network.x))
        for fn, params in ((network.fn, masked), (small.apply, small.params))
    ]
    errors = [float(abs(a - b).max() / abs(a).max()) for a, b in zip(*outputs, strict=True)]
    return [f"{small.macs() / graph.macs():.2f}", f"{max(errors):.0e}"]


def shorten(refusal: Refusal) -> str:
    """Returns a reason without sizes, with the primitive."""
    reason = refusal.reason.partition(" of an array of")[0].partition("; ")[0]
    return f"{re.sub(r' along axis [0-9]+', '', reason)} (`{refusal.primitive}`)"


def measure(name: str, is_cut: bool) -> tuple[list[str], set[str]]:
    """Returns the row of a network, and the reasons that it meets."""
    start = time.perf_counter()
    network = open_jax(name) if name in JAX else open_torch(name)
    graph = sparsity.trace(network.fn, network.params, network.x)
    floats = {x.path for x in graph.parameters if jnp.issubdtype(x.dtype, jnp.inexact)}
    refused = [x for x in graph.refused if x.path in floats and x.primitive != "unread"]
    streams = sum(group.kind == "stream" for group in graph.groups)
    row = [name, *map(str, (len(graph.groups), streams, len(refused)))]
    row += [f"{time.perf_counter() - start:.0f}", *(cut(network, graph) if is_cut else ["", ""])]
    return row, {shorten(x) for x in refused}


def compare_with_torch_pruning(name: str) -> str:
    """Returns the parameters that both libraries leave at half of each group, as text."""
    network, (module, size) = open_torch(name), make_module(name)
    graph = sparsity.trace(network.fn, network.params, network.x)
    scope = sparsity.Coupled(graph)
    half = sparsity.Uniform(0.5)
    pruner = sparsity.MagnitudePruning(scope=scope, sparsity_distribution_fn=half)
    small = sparsity.shrink(graph, *pruner.instant_sparsify(network.params))
    trained = {key for key, _ in module.named_parameters()}
    ours = sum(x.size for key, x in small.params.items() if key in trained)
    head = [x for x in module.modules() if getattr(x, "out_features", 0) == 1000]
    torch_pruning.pruner.MagnitudePruner(
        module, torch.ones(1, 3, size, size), torch_pruning.importance.MagnitudeImportance(),
        pruning_ratio=0.5, ignored_layers=head,
    ).step()  # fmt: skip
    theirs = sum(x.numel() for x in module.parameters())
    return f"{name}: {ours:,} parameters, with torch-pruning {theirs:,}"


def main() -> None:
    """Runs the networks in turn and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", action="store_true", help="stop before the cut")
    parser.add_argument("--pruning", action="store_true", help="compare with torch-pruning")
    parser.add_argument("names", nargs="*", default=[*TORCHVISION, *TIMM, *JAX])
    options = parser.parse_args()
    if options.pruning:
        print(*map(compare_with_torch_pruning, ("resnet50", "vit_b_16")), sep="\n")
        return
    rows, counts = [], collections.Counter[str]()
    for name in options.names:
        try:
            row, reasons = measure(name, not options.trace)
        except Exception as error:  # torchax lacks what some networks need
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        finally:
            jax.clear_caches()
        print(*row, flush=True)
        rows.append(row)
        counts.update(reasons)
    reasons = [[reason, str(count)] for reason, count in counts.most_common()]
    print(table(HEAD, rows), table(["reason", "networks"], reasons), sep="\n\n")


if __name__ == "__main__":
    main()
