// How one-byte scales lie in memory where they are in tiles, by the numbers that the host gives.
#pragma once

constexpr int SCALES_BLOCKED = 1;         // 32x4x4 tiles over all rows
constexpr int SCALES_BLOCKED_GROUPS = 2;  // 32x4x4 tiles, every group on tiles of its own
