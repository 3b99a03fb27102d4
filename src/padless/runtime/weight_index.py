"""Indexes of folders of .safetensors files, which say in which file each tensor is. A wrong one is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path


def index_of(folder: Path) -> dict[str, str] | None:
    """The file of the folder that each tensor is in, by its index; None where there is no index. Raises ValueError."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(
            f"source has {len(found)} indexes, {', '.join(path.name for path in found)}; it must have one at most"
        )
    try:
        content = json.loads(found[0].read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"source has an index that cannot be read, {found[0].name}: {error}") from None
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(f"source has {found[0].name}, whose weight_map must be an object of file names")
    for name, file in names.items():
        if not file or "/" in file or "\\" in file or file in (".", ".."):
            raise ValueError(
                f"source has {found[0].name} with {name!r} in {file!r}; it must be the name of a file in the folder"
            )
    return names


def indexed_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """The files that the index names. Raises ValueError where one is missing."""
    files = [folder / name for name in sorted(set(index.values()))]
    for file in files:
        if not file.is_file():
            raise ValueError(f"source has an index that names {file.name}, which is not in {str(folder)!r}")
    return files


def check_complete(index: Mapping[str, str], names: Collection[str]) -> None:
    """Raises ValueError for tensors of the index that are not among ``names``, those that were found in its files."""
    missing = [name for name in index if name not in names]
    if missing:
        raise ValueError(
            f"source has an index with {missing[0]!r} in {index[missing[0]]}, where it is not "
            f"({len(missing)} of {len(index)} names are missing)"
        )
