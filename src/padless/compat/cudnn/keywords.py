"""Keywords of cuDNN frontend 1.32's calls that have no argument here: those without effect, and those of one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.ops.checks import describe

# What chooses cuDNN's kernel, and what that needs.
NO_EFFECT = (
    *("c_dtype", "mma_tiler_mn", "cluster_shape_mn", "vector_f32", "use_dynamic_sched"),
    *("use_single_group_runtime_offsets", "scheduler_counter_tensor", "sample_scheduler_counter"),
)
# Of cuDNN's GLU call: what its other activations are computed with.
NO_EFFECT_OF_GLU = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "situ_beta1", "situ_beta2")
_ROW_SCALE = "without a bias prob_tensor does the same"
# The one value, cuDNN's default, and what there is in place of others.
ONE_VALUE: dict[str, tuple[object, str]] = {
    "b_ptrs": (None, "stack the weights in b_tensor"),
    "sfb_ptrs": (None, "stack the scales in sfb_tensor"),
    "n": (None, "b_tensor says it"),
    "b_dtype": (None, "b_tensor says it"),
    "num_experts": (None, "sample_b says it"),
    "b_shape": (None, "sample_b says it"),
    "b_major": ("k", "copy N-major weights"),
    "row_scale_tensor": (None, _ROW_SCALE),
    "sample_row_scale": (None, _ROW_SCALE),
    "d_tensor": (None, "GroupedGemmQuant and grouped_gemm_epilogue write into given tensors"),
    "sf_fp8_dtype_override": (None, "scales are of their tensor's dtype"),
}
# Of cuDNN's GLU call.
ONE_VALUE_OF_GLU: dict[str, tuple[object, str]] = {
    "act_func": ("swiglu", "grouped_gemm and padless.moe.activate_quantize compute other activations"),
    "generate_c": (False, "grouped_gemm has the sums before the activation"),
}


def check_others(call: str, others: Mapping[str, Any]) -> None:
    """Raises TypeError for keywords that cuDNN has not either, and ValueError for values that are not possible."""
    is_glu = call == "grouped_gemm_swiglu_quant"
    without_effect = NO_EFFECT + (NO_EFFECT_OF_GLU if is_glu else ())
    of_one_value = ONE_VALUE | (ONE_VALUE_OF_GLU if is_glu else {})
    for name, value in others.items():
        if name in without_effect:
            continue
        if name not in of_one_value:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        only, instead = of_one_value[name]
        if value is not only and not (isinstance(value, str) and value == only):
            given = repr(value) if isinstance(value, str | int) else describe(value)
            raise ValueError(f"{name} is {given}; it must be {only!r}: {instead}")
