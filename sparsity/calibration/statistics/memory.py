"""Check that Gram matrices fit into memory, before they are allocated."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping

import jax


def check_memory(grams: Mapping[str, jax.ShapeDtypeStruct], copies: int = 1) -> None:
    """Raises a ValueError with the bytes of Gram matrices if they do not fit into memory.

    Args:
      grams: [*batch, inputs, inputs] of all parameters that are held together, by name.
      copies: number of arrays of these sizes at once, while sums are added up or solved.
    """
    free = free_memory(device := jax.local_devices()[0])
    sizes = {name: math.prod(x.shape) * x.dtype.itemsize for name, x in grams.items()}
    total = copies * sum(sizes.values())
    if total > free:
        name = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"The Gram matrices of the inputs take {total:,} bytes ({copies} of each at once), "
            f"and {device.device_kind} has {free:,} free; the largest is that of {name!r}, shape "
            f"{grams[name].shape}, with {sizes[name]:,}. Keep such parameters dense by filter_fn, "
            "or prune by MagnitudePruning, WandaPruning or RIAPruning without a refit, for which "
            "kind='squares' is enough, or with calibration.Means()."
        )


def free_memory(device: jax.Device) -> int:
    """Returns the free bytes of a device, or of the machine for a CPU."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux
