"""Common parts of kernel configurations: field checks, C++ constants, sizes of the table of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from padless.formats import OUT_DTYPES as OUT_DTYPES
from padless.formats import BlockScaledTensor

BF16 = "BF16"  # stands for a format's name where activations are plain bfloat16
# The table of groups in shared memory comes in these sizes. The largest takes the place of a stage or two.
FEW_GROUPS, MANY_GROUPS, MAX_GROUPS = 256, 1024, 4096


def format_name(t: BlockScaledTensor | torch.Tensor) -> str:
    """The name of an operand's format in ``padless.kernels.table.ROUTES``."""
    return t.format.name if isinstance(t, BlockScaledTensor) else BF16


def room_for_groups(num_groups: int) -> int:
    """Size of the compiled table of groups for ``num_groups``: one of three, so that few kernels serve all."""
    return next((room for room in (FEW_GROUPS, MANY_GROUPS) if num_groups <= room), MAX_GROUPS)


Requirement = Callable[[bool, str, str], None]


def requirement_of(config: object) -> Requirement:
    """require(ok, field, allowed): a ValueError that names the field of ``config`` and what it was, unless ok."""

    def require(ok: bool, field: str, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{type(config).__name__}.{field} is {getattr(config, field)!r}; allowed: {allowed}")

    return require


def check_common_fields(config: Any, require: Requirement, most_stages: int = 12) -> None:
    """Checks num_stages, raster_m, max_groups and out_dtype of a configuration. Raises ValueError by ``require``."""
    stages = config.num_stages
    allowed = f"0 (as many as fit) or 2 to {most_stages}"
    require(stages == 0 or 2 <= stages <= most_stages, "num_stages", allowed)
    require(config.raster_m >= 1, "raster_m", "1 or more")
    require(1 <= config.max_groups <= MAX_GROUPS, "max_groups", f"1 to {MAX_GROUPS}")
    require(config.out_dtype in OUT_DTYPES, "out_dtype", "torch.bfloat16, torch.float16 or torch.float32")


def fields_of(config: object, *names: str) -> dict[str, Any]:
    """Fields of a configuration by the names of their constants, which are in capitals."""
    return {name.upper(): getattr(config, name) for name in names}


def cpp_constants(
    integers: Mapping[str, int],
    flags: Mapping[str, bool] = MappingProxyType({}),
    macros: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """The constants that a kernel's source is compiled behind; macros where the values are names that it defines."""
    lines = [f"constexpr int {name} = {value};" for name, value in integers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"#define {name} {value}" for name, value in macros.items()]
    return "\n".join(lines) + "\n"
