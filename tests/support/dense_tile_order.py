"""The Python twin of ``kernels/sm100_dense/tile_order.cuh``: in which order the tiles of a dense product are computed.

The two are compared exhaustively; it also serves to reason about cache reuse.
"""

from __future__ import annotations

from collections.abc import Iterator

Point = tuple[int, int]


def tile_order(order: str, m_tiles: int, n_tiles: int) -> Iterator[Point]:
    """(m_tile, n_tile) of every tile, in the order of their numbers: "row" or "hilbert"."""
    if order == "row":
        return ((m, n) for m in range(m_tiles) for n in range(n_tiles))
    if n_tiles >= m_tiles:
        return _walk((0, 0), (0, 1), n_tiles, (1, 0), m_tiles)
    return _walk((0, 0), (1, 0), m_tiles, (0, 1), n_tiles)


def _walk(start: Point, a: Point, along: int, b: Point, across: int) -> Iterator[Point]:
    """The curve from ``start`` over ``along`` tiles in direction ``a`` and ``across`` in direction ``b``.

    It ends at the far end of ``a``, on the side it began on. After J. Cerveny's generalized Hilbert curve.
    """
    if along == 0 or across == 0:
        return
    if across == 1 or along == 1:
        direction, length = (a, along) if across == 1 else (b, across)
        yield from (_step(start, direction, i) for i in range(length))
        return
    half_along, half_across = along // 2, across // 2
    if 2 * along > 3 * across:  # long: two parts, one after the other
        half_along += half_along % 2 == 1 and along > 2
        yield from _walk(start, a, half_along, b, across)
        yield from _walk(_step(start, a, half_along), a, along - half_along, b, across)
        return
    half_across += half_across % 2 == 1 and across > 2
    corner = _step(start, b, half_across)
    last = _step(_step(start, a, along - 1), b, half_across - 1)
    yield from _walk(start, b, half_across, a, half_along)
    yield from _walk(corner, a, along, b, across - half_across)
    yield from _walk(last, (-b[0], -b[1]), half_across, (-a[0], -a[1]), along - half_along)


def _step(point: Point, direction: Point, length: int) -> Point:
    return point[0] + direction[0] * length, point[1] + direction[1] * length
