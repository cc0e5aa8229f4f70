"""Positions as gaps: how many entries lie between a position and the one before.

A gap of `top`, the largest number of the code's dtype, or more takes several codes: each code `top`
skips that many entries, and the first smaller code ends the gap. At a density of 1 % a position
takes 1.1 bytes, at 0.1 % 2 bytes.
"""

from __future__ import annotations

import numpy as np

DTYPES = (np.uint8, np.uint16, np.uint32)


def encode(positions: np.ndarray) -> np.ndarray:
    """Encodes positions in the dtype of `DTYPES` that takes the fewest bytes.

    Args:
      positions: int[k], ascending, none twice.

    Returns:
      uint8, uint16 or uint32 codes, at least k of them.

    Example:
      >>> encode(np.array([0, 1, 300]))
      array([  0,   0, 255,  43], dtype=uint8)
    """
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = [np.sum(gaps // np.iinfo(dtype).max + 1) * np.iinfo(dtype).bits for dtype in DTYPES]
    dtype = DTYPES[int(np.argmin(sizes))]
    top = np.iinfo(dtype).max
    ends = np.cumsum(gaps // top + 1)
    codes = np.full(ends[-1] if ends.size else 0, top, dtype)
    codes[ends - 1] = gaps % top
    return codes


def decode(codes: np.ndarray) -> np.ndarray:
    """Returns the positions, int64[k], that `encode` encoded.

    Example:
      >>> decode(np.array([0, 0, 255, 43], np.uint8))
      array([  0,   1, 300])
    """
    is_end = codes != np.iinfo(codes.dtype).max
    steps = codes.astype(np.int64)
    steps[is_end] += 1
    return np.cumsum(steps)[is_end] - 1
