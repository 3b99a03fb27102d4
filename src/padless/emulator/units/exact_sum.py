"""Exact sums of a few float64 arrays, rounded once.

Expansions after J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric Predicates"
(1997): GROW-EXPANSION keeps the running sum exactly as non-overlapping components, COMPRESS makes the largest of them a
correct approximation to within one unit in its last place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from padless.emulator.units.number_formats import Array


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def round_sum(terms: Sequence[Array]) -> Array:
    """The exact sum of finite float64 arrays, rounded to odd in float64.

    Rounding the result again to any format of at most 51 bits gives that format's correct rounding of the exact sum.
    """
    expansion: list[Array] = []
    for term in terms:
        q = np.asarray(term, np.float64)
        grown = []
        for component in expansion:
            q, error = two_sum(q, component)
            grown.append(error)
        expansion = [*grown, q]
    top, rest = _compress(expansion)
    bits = np.ascontiguousarray(top).view(np.int64)
    # Toward zero, then odd: the bits of a float64 are ordered like its magnitude.
    odd = (bits - (np.signbit(rest) != np.signbit(top))) | 1
    return np.where(rest != 0, odd, bits).view(np.float64)


def _compress(expansion: list[Array]) -> tuple[Array, Array]:
    """The correctly placed largest component, and a number with the sign of what is left (0 if nothing is)."""
    q = expansion[-1]
    down = []
    for component in reversed(expansion[:-1]):
        q, error = two_sum(q, component)
        down.append(np.where(error != 0, q, 0.0))
        q = np.where(error != 0, error, q)
    up = []
    for component in reversed(down):
        q, error = two_sum(component, q)
        up.append(error)
    rest = np.zeros_like(q)
    for error in up:  # ascending: the last non-zero one is the largest
        rest = np.where(error != 0, error, rest)
    return q, rest
