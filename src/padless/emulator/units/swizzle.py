"""The shared-memory XOR swizzles of the copy engine and of matrix descriptors.

They act on absolute shared-memory byte addresses: 16-byte chunks (32-byte ones in "128B_32B") of a row trade
places by address bits 7 and up. Example: with "128B" byte 0x1230 goes to 0x1270, because its bits 7-9 are 4 (PTX ISA,
"Swizzling modes").
"""

from __future__ import annotations

from padless.emulator.units.number_formats import Array

# mode -> (mask of the address bits from 7 up, how far left they are put)
_MODES = {"none": (0, 0), "32B": (1, 4), "64B": (3, 4), "128B": (7, 4), "128B_32B": (3, 5)}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_32B": 128}  # bytes of a row that the pattern permutes
PERIOD = {"none": 16, "32B": 256, "64B": 512, "128B": 1024, "128B_32B": 512}  # bytes after which it repeats


def swizzle(addresses: Array, mode: str) -> Array:
    """Swizzled byte addresses of any integer array (or one int). Raises ValueError for an unknown mode."""
    if mode not in _MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(_MODES)}")
    mask, shift = _MODES[mode]
    return addresses ^ (((addresses >> 7) & mask) << shift) if mask else addresses
