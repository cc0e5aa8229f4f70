"""Frees compiled programs of processes that run many tests."""

import os
from pathlib import Path

import jax


def free_programs(max_maps):
    """Frees compiled programs where they use up memory; else tests share what they compile.

    Nine maps of memory, or half a megabyte, are a small program; Linux allows 65,530 maps.
    """
    process = Path("/proc/self")
    if process.exists():
        pages = int((process / "statm").read_text(encoding="ascii").split()[1])
        num_maps = (process / "maps").read_bytes().count(b"\n")
        if pages * os.sysconf("SC_PAGE_SIZE") <= 2**31 and num_maps <= max_maps:
            return
    jax.clear_caches()
