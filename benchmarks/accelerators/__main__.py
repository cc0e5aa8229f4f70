"""Reads what a training step launches, moves and holds on accelerators from compiled programs.

XLA compiles for TPUs and GPUs on a machine that has neither: what it schedules is the same in every
run. A step is adam (`update` and `apply_updates`, params and state donated) with gradients as
arguments; the figures of each algorithm at 90 % are what it adds to adam alone.

    bash run.sh accelerators [--devices D ...] [--trees T ...] [--layouts L ...]
                             [--algorithms A ...] [--write | --limits]

Rows appear as they are measured. --write puts them into benchmarks/RESULTS.md, where they replace
rows of the same program. --limits checks the cases of limits.py, as `bash run.sh` does.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import sparsity
from benchmarks import results
from benchmarks.accelerators import compiled
from benchmarks.accelerators.limits import LIMITS
from benchmarks.compile import shapes
from sparsity.training.hooks import is_overridden

HEADING = "## Accelerators"
INNER = "adam"
Params: TypeAlias = dict[str, jax.ShapeDtypeStruct]
Place: TypeAlias = tuple[str, str, str]  # device, tree, layout


class Case(NamedTuple):
    """A program: kind and number of devices, tree, layout of the parameters, algorithm."""

    device: str
    tree: str
    layout: str
    algorithm: str


class Figures(NamedTuple):
    """Costs of a step on a device, or what an algorithm adds to those of adam.

    Bytes are those for each weight that the device holds, collectives are in kB.

    Attributes:
      temporaries: bytes that the program holds beside its arguments and results.
      kernels: kernels and copies of an ordinary step.
      moved: bytes read and written by an ordinary step.
      collectives: results of collectives in an ordinary step.
      update_kernels: kernels and copies of a step that updates masks.
      update_moved: bytes read and written by a step that updates masks.
      update_collectives: results of collectives in a step that updates masks.
      compile: CPU-seconds to trace, lower and compile the step, adam included.
    """

    temporaries: float
    kernels: float
    moved: float
    collectives: float
    update_kernels: float
    update_moved: float
    update_collectives: float
    compile: float


DEVICES = {
    "v5e": ("tpu", 1),
    "8 v5e": ("tpu", 8),
    "256 v5e": ("tpu", 256),
    "H100": ("gpu", 1),
    "8 H100": ("gpu", 8),
}
SLICES = {1: "v5e:2x2", 8: "v5e:2x4", 256: "v5e:16x16"}  # the smallest slice of a TPU is of 4 chips
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

BLOCK = [*[(512, 512)] * 4, *[(512, 2048)] * 2, (2048, 512), (512,)]  # attention, gated MLP, scale
TREES: dict[str, list[tuple[int, ...]]] = {
    "two": [(8192, 8192)] * 2,
    "ResNet-50": [x for kernel in shapes("resnet50") for x in (kernel, kernel[-1:])],
    "blocks": BLOCK * 32,
    "stack": [(32, *x) for x in BLOCK],
}
BATCH_AXES = {"stack": 1}
LAYOUTS = ("replicated", "first", "last", "first, Explicit", "last, Explicit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = sparsity.all_algorithm_names()
    for flag, choices in [("devices", DEVICES), ("trees", TREES), ("layouts", LAYOUTS)]:
        parser.add_argument(f"--{flag}", nargs="+", default=[*choices], choices=choices)
    parser.add_argument("--algorithms", nargs="+", default=names, choices=names)
    parser.add_argument("--write", action="store_true", help="put the rows into RESULTS.md")
    parser.add_argument("--limits", action="store_true", help="check the cases of limits.py alone")
    options = parser.parse_args()
    if options.limits:
        check_limits()
        return
    for place in itertools.product(options.devices, options.trees, options.layouts):
        if DEVICES[place[0]][1] == 1 and place[2] != LAYOUTS[0]:
            continue
        for case, figures in compare(place, options.algorithms):
            row = cells(case, figures)
            print(*row, sep="\t", flush=True)
            if options.write:
                write(row)


def check_limits() -> None:
    """Prints the cases that have limits; exits with the figures that exceed their limits."""
    algorithms: dict[Place, list[str]] = {}
    for device, tree, layout, algorithm in LIMITS:
        algorithms.setdefault((device, tree, layout), []).append(algorithm)
    exceeded = []
    for place, names in algorithms.items():
        for case, figures in compare(place, names):
            print(*cells(case, figures), sep="\t", flush=True)
            if case not in LIMITS:
                continue
            for name, limit in LIMITS[case]._asdict().items():
                value = round(getattr(figures, name), 1)
                if limit is not None and value > limit:
                    exceeded.append(f"{', '.join(case)}: {name} = {value} exceeds {limit}")
    sys.exit("\n".join(exceeded) or 0)


def compare(place: Place, algorithms: Iterable[str]) -> Iterator[tuple[Case, Figures]]:
    """Yields the figures of adam alone, then for each algorithm what a step costs more."""
    inner = measure(Case(*place, INNER))
    yield Case(*place, INNER), inner
    for name in algorithms:
        figures = measure(case := Case(*place, name))
        more = Figures(*(x - y for x, y in zip(figures, inner, strict=True)))
        yield case, more._replace(compile=figures.compile)


def measure(case: Case) -> Figures:
    """Compiles a step and reads its figures; a step that does not compile has infinite ones."""
    params, mesh = make_params(case)
    start = time.process_time()
    with jax.set_mesh(mesh):
        step, args = make_step(case, params)
        try:
            program = step.lower(*args).compile()
        except jax.errors.JaxRuntimeError as error:
            print(f"{', '.join(case)}: {str(error).splitlines()[0]}", file=sys.stderr)
            return Figures(*[math.inf] * len(Figures._fields))
    seconds = time.process_time() - start
    weights = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in params.values())
    text = program.as_text()
    ordinary, update = (compiled.read(text, is_update=x) for x in (False, True))
    return Figures(
        program.memory_analysis().temp_size_in_bytes / weights,
        ordinary.kernels,
        ordinary.moved / weights,
        ordinary.collectives / 1000,
        update.kernels,
        update.moved / weights,
        update.collectives / 1000,
        seconds,
    )


def make_params(case: Case) -> tuple[Params, Mesh]:
    """Returns the shapes of the parameters on the devices of a case, and their mesh."""
    kind = AxisType.Explicit if case.layout.endswith("Explicit") else AxisType.Auto
    mesh = Mesh(make_devices(*DEVICES[case.device]), ("fsdp",), axis_types=(kind,))
    batch_axes = BATCH_AXES.get(case.tree, 0)
    params = {}
    for i, shape in enumerate(TREES[case.tree]):
        axes = [x for x in range(batch_axes, len(shape)) if shape[x] % mesh.size == 0]
        spec: list[str | None] = [None] * len(shape)
        if axes and case.layout != LAYOUTS[0]:
            spec[axes[-1 if case.layout.startswith("last") else 0]] = "fsdp"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        params[f"{i}"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return params, mesh


@functools.cache
def make_devices(platform: str, number: int) -> np.ndarray:
    """Returns devices that are not there."""
    if platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[number])
    else:
        topology = topologies.get_topology_desc(
            "h100", "cuda", target_config=H100, topology=f"1x1x{number}"
        )
    return np.array(topology.devices[:number])


def make_step(case: Case, params: Params) -> tuple[jax.stages.Wrapped, tuple[object, ...]]:
    """Returns a step and the shapes of its arguments."""
    name, _, stored = case.algorithm.partition(", ")
    options: dict[str, object] = {"algorithm": "no_prune" if name == INNER else name}
    options |= {"store_masks": True} if stored else {}
    options |= {"sparsity": 0.9, "batch_axes": BATCH_AXES.get(case.tree, 0)}
    updater = sparsity.create_updater_from_config(
        options | {"scheduler": sparsity.PeriodicSchedule(1000)}
    )
    inner = optax.adam(1e-3)
    tx = inner if case.algorithm == INNER else updater.wrap_optax(inner)
    state = jax.eval_shape(tx.init, params)
    state_shardings = sparsity.sharding_like(params, state)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        state_shardings,
    )

    def step(
        params: optax.Params, state: optax.OptState, grads: optax.Params
    ) -> tuple[object, ...]:
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        if is_overridden(updater, "pre_forward_update"):  # the model reads masked weights
            return new_params, new_state, updater.pre_forward_update(params, state)
        return new_params, new_state, None

    shardings = {name: x.sharding for name, x in params.items()}
    compiled_step = jax.jit(
        step, donate_argnums=(0, 1), out_shardings=(shardings, state_shardings, None)
    )
    return compiled_step, (params, state, params)


def cells(case: Case, figures: Figures) -> list[str]:
    """Returns the cells of a row; figures that an algorithm adds have a sign."""
    sign = "" if case.algorithm == INNER else "+"
    formats = [f"{sign}.{0 if 'kernels' in name else 1}f" for name in Figures._fields]
    return [*case, *map(format, figures, [*formats[:-1], ".1f"])]


def write(row: Sequence[str]) -> None:
    """Puts a row into RESULTS.md, in place of the row of the same program."""
    text = results.RESULTS.read_text(encoding="utf-8")
    section = re.search(rf"(?ms)^{HEADING}$.*?(?=^## |\Z)", text)
    lines = section[0].splitlines() if section else []
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    by_case = {tuple(row[:4]): row for row in [*rows[2:], row]}
    names = [[*DEVICES], [*TREES], [*LAYOUTS], [INNER, *sparsity.all_algorithm_names()]]
    ordered = sorted(
        by_case, key=lambda case: [x.index(y) for x, y in zip(names, case, strict=True)]
    )
    results.write_section(report([by_case[case] for case in ordered]))


def report(rows: Sequence[Sequence[str]]) -> str:
    """Returns the section of RESULTS.md."""
    head = ["device", "tree", "layout", "algorithm", "temporaries, B/w"]
    for step in ("ordinary step", "update"):
        head += [f"{step}: kernels", "moved, B/w", "collectives, kB"]
    return (
        f"{HEADING}\n\n{datetime.date.today()}, jax {jax.__version__}, libtpu "
        f"{metadata.version('libtpu')}. Read from compiled programs: no device ran. A step of "
        "adam, float32, params and state donated, with gradients as arguments: `adam` is this step "
        "alone, the figures of an algorithm at 90 % are what it adds. B/w: bytes for each weight "
        "that a device holds. Temporaries are those of the program, for both kinds of steps. "
        "Kernels include copies. Moved: what kernels read and write in the memory of a device. "
        "Collectives: results on a device. A loop that ends by its data counts as "
        f"{compiled.UNCOUNTED_TRIPS} passes. CPU-seconds are those to trace, lower and compile "
        "the program, adam included. `two` are two matrices of 8192 x 8192; `ResNet-50` has 54 "
        "kernels and 54 vectors; `blocks` are 32 blocks of a transformer with 8 leaves each, "
        "`stack` the same in 8 leaves with a batch axis. `first` and `last` shard the first or the "
        "last axis of a leaf that the devices divide, batch axes apart.\n\n"
        f"{results.table([*head, 'compile, CPU s'], rows)}"
    )


if __name__ == "__main__":
    main()
