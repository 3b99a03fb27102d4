"""Keywords of cuDNN frontend 1.32's quantizing calls, and what the calls of padless make of each: a table of the docs.

`python tests/support/cudnn_keywords.py --write` writes it anew.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from padless import MXFP8, GroupedGemmQuant, grouped_gemm_quant
from padless.compat.cudnn.keywords import NO_EFFECT, NO_EFFECT_OF_GLU, ONE_VALUE, ONE_VALUE_OF_GLU, check_others
from support.quant_calls import as_cudnn, operands

NEEDED = "needed"
# Of grouped_gemm_quant_wrapper_sm100 in its order, with defaults; and what only the class has.
CALL: dict[str, Any] = {
    **dict.fromkeys(("a_tensor", "sfa_tensor", "padded_offsets", "alpha_tensor"), NEEDED),
    **dict.fromkeys(("b_tensor", "sfb_tensor", "bias_tensor", "b_ptrs", "sfb_ptrs", "n", "b_dtype")),
    "b_major": "k",
    **dict.fromkeys(("norm_const_tensor", "prob_tensor", "row_scale_tensor", "acc_dtype", "d_dtype", "d_tensor")),
    "cd_major": "n",
    "mma_tiler_mn": (256, 256),
    "cluster_shape_mn": None,
    "sf_vec_size": 16,
    "sf_fp8_dtype_override": None,
    "vector_f32": False,
    "m_aligned": 256,
    "discrete_col_sfd": False,
    "use_dynamic_sched": False,
    "use_single_group_runtime_offsets": False,
    "current_stream": None,
    "generate_amax": True,
    "scheduler_counter_tensor": None,
}
CLASS: dict[str, Any] = dict.fromkeys(("num_experts", "b_shape", "sample_row_scale", "sample_scheduler_counter"))
# What grouped_gemm_glu_wrapper_sm100 has besides.
GLU: dict[str, Any] = {
    "c_dtype": None,
    "act_func": "swiglu",
    "linear_offset": None,
    "geglu_alpha": 1.702,
    "glu_clamp_max": 7.0,
    "glu_clamp_min": -7.0,
    "situ_beta1": 4.0,
    "situ_beta2": 25.0,
    "generate_c": False,
}
# What is said of defaults that are not cuDNN's.
OWN = {
    "alpha_tensor": "None is 1",
    "sf_vec_size": "None: the format's; another is refused",
    "m_aligned": "1: groups may end anywhere",
    "d_dtype": "None: bfloat16",
    "acc_dtype": "float32 or None; another is refused",
    "cd_major": "'n'; another is refused",
}
ANOTHER: dict[str, Any] = {
    "b_major": "n",
    "n": 192,
    "sf_fp8_dtype_override": "e5m3",
    "num_experts": 4,
    "act_func": "geglu",
    "generate_c": True,
}


def call(**changes: Any) -> Any:
    a, b, offs = operands(MXFP8)
    return grouped_gemm_quant(**as_cudnn(a, b), padded_offsets=offs, **changes)


def sentence(name: str) -> str:
    """What is said of another value. AssertionError where it is taken."""
    try:
        wrapper = "grouped_gemm_swiglu_quant" if name in GLU else "grouped_gemm_quant"
        check_others(wrapper, {name: ANOTHER.get(name, torch.ones(4))})
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{name} is taken")


def rows() -> list[str]:
    own = inspect.signature(grouped_gemm_quant).parameters
    found = []
    for name, default in (CALL | CLASS | GLU).items():
        shown = default if default == NEEDED else f"`{default!r}`"
        if name in own:
            here = f"has; {OWN[name]}" if name in OWN else "has"
        else:
            here = "no effect" if name in NO_EFFECT + NO_EFFECT_OF_GLU else f"refuses others: {sentence(name)}"
        found.append(f"| `{name}` | {shown} | {here} |")
    return found


def table() -> str:
    return "\n".join(["| keyword | cuDNN's default | padless |", "|---|---|---|", *rows()]) + "\n"


def page() -> Path:
    return Path(__file__).parents[2] / "docs" / "grouped_gemm_quant.md"


def written() -> str:
    return page().read_text().split("<!-- keywords:begin -->\n")[1].split("<!-- keywords:end -->")[0]


def known() -> set[str]:
    """Every keyword that is taken without being an argument."""
    assert "others" in inspect.signature(GroupedGemmQuant.__init__).parameters
    return {*NO_EFFECT, *NO_EFFECT_OF_GLU, *ONE_VALUE, *ONE_VALUE_OF_GLU}


if __name__ == "__main__":
    if "--write" in sys.argv:
        page().write_text(page().read_text().replace(written(), table()))
    else:
        print(table(), end="")
