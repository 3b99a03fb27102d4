// Which tile of a dense product is number i: row after row, or along a Hilbert curve.
//
// This header is plain C++ apart from the qualifiers: the tests compile it for the CPU and compare it with its Python
// twin, dense_schedule.py.
#pragma once

constexpr int ORDER_ROW = 0, ORDER_HILBERT = 1;

struct GridPoint {
    int m, n;  // in tiles
};

// Rows of tiles, each walked along N.
__device__ __forceinline__ GridPoint row_order(int number, int n_tiles) {
    const int m = number / n_tiles;
    return GridPoint{m, number - m * n_tiles};
}

// A Hilbert curve over a grid of any shape: neighbours in number are neighbours in the grid, so the tiles in flight share
// rows of A and columns of B. A rectangle that is long is cut across into two; another into three, of which the first
// and the last are walked along its shorter side. Both cuts are made at even lengths where that is possible, or the
// curve would have to step diagonally more often. Idea: J. Cerveny, "Generalized Hilbert space-filling curve".
__device__ __forceinline__ GridPoint hilbert_order(int number, int m_tiles, int n_tiles) {
    // A rectangle that is walked from (m, n), `along` tiles in direction (am, an) and `across` in (bm, bn).
    int m = 0, n = 0, am = 0, an = 0, bm = 0, bn = 0, along, across;
    if (n_tiles >= m_tiles) {
        an = bm = 1;
        along = n_tiles;
        across = m_tiles;
    } else {
        am = bn = 1;
        along = m_tiles;
        across = n_tiles;
    }
    while (along > 1 && across > 1) {
        int half_along = along / 2, half_across = across / 2;
        if (2 * along > 3 * across) {
            half_along += half_along % 2 != 0 && along > 2;
            const int first = half_along * across;
            if (number < first) {
                along = half_along;
            } else {
                number -= first;
                m += am * half_along;
                n += an * half_along;
                along -= half_along;
            }
            continue;
        }
        half_across += half_across % 2 != 0 && across > 2;
        const int first = half_across * half_along;
        const int second = along * (across - half_across);
        if (number >= first && number < first + second) {
            number -= first;
            m += bm * half_across;
            n += bn * half_across;
            across -= half_across;
            continue;
        }
        const int old_am = am, old_an = an;
        if (number < first) {
            am = bm;
            an = bn;
            bm = old_am;
            bn = old_an;
            along = half_across;
            across = half_along;
        } else {  // back along the other side
            number -= first + second;
            m += am * (along - 1) + bm * (half_across - 1);
            n += an * (along - 1) + bn * (half_across - 1);
            am = -bm;
            an = -bn;
            bm = -old_am;
            bn = -old_an;
            across = along - half_along;
            along = half_across;
        }
    }
    const bool line = across == 1;
    return GridPoint{m + (line ? am : bm) * number, n + (line ? an : bn) * number};
}
