"""Reads a cubin, a 64-bit little-endian ELF file (System V gABI, "Sections", "Symbol Table")."""

from __future__ import annotations

import struct
from typing import NamedTuple

_SYMBOL_TABLE = 2  # the type of a section


class Section(NamedTuple):
    """Place of a section in the file, in bytes. link: number of the section that it refers to."""

    name: str
    type: int
    offset: int
    size: int
    link: int
    entry_size: int


def sections(image: bytes) -> list[Section]:
    """The sections of a file, by number."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    return [Section(_string(image, headers[names][4] + h[0]), h[1], h[4], h[5], h[6], h[9]) for h in headers]


def constant(image: bytes, name: str) -> int | None:
    """The value of ``extern "C" __device__ const int name``; None where there is none."""
    found = sections(image)
    for table in found:
        if table.type != _SYMBOL_TABLE:
            continue
        for at in range(table.offset, table.offset + table.size, table.entry_size):
            name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            if _string(image, found[table.link].offset + name_at) == name:
                return int(struct.unpack_from("<i", image, found[section].offset + value)[0])
    return None


def _string(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()
