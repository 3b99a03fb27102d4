"""torch.autocast("cuda") for tensors that pretend: arguments cast by the function's name, as torch does it on a GPU.

The lists are those of ATen/autocast_mode.h (docs: "Autocast Op Reference"), which a test compares; functions of Python
that torch takes apart first stand with what their parts do. In-place forms and calls with `out` are not cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOWER = frozenset(
    ["_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
     "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
     "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "lstm_cell", "gru_cell",
     "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention"]
)  # fmt: skip
FLOAT32 = frozenset(
    ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
     "sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
     "frobenius_norm", "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
     "nll_loss", "kl_div", "hinge_embedding_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
     "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
     "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
     "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum",
     "norm", "rpow", "cross_entropy", "interpolate", "normalize", "softmin", "gumbel_softmax"]
)  # fmt: skip
WIDEST = frozenset(
    ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
     "scatter_add", "grid_sample"]
)  # fmt: skip
# what torch takes apart in ways that are not followed here
APART = frozenset(["multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"])


def cast(torch: Any, function: Any, args: Any, kwargs: Any, refuse: Callable[[str], None]) -> tuple[Any, Any]:
    """The arguments of a call on the GPU as torch.autocast("cuda") has them."""
    name = getattr(function, "__name__", "")
    name = name.strip("_") if name.startswith("__") else name
    if name == "rmatmul":
        name = "matmul"
    if not torch.is_autocast_enabled("cuda") or kwargs.get("out") is not None:
        return args, kwargs

    def eligible(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 8

    def to(value: Any, kind: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(to(v, kind) for v in value) if type(value) in (list, tuple) else value
        return value.to(kind) if eligible(value) else value

    if name in LOWER:
        kind = torch.get_autocast_dtype("cuda")
    elif name in FLOAT32 and kwargs.get("dtype") is None and kwargs.get("mode") != "area":
        kind = torch.float32
    elif name in WIDEST:
        kinds = {value.dtype for value in (*args, *kwargs.values()) if eligible(value)}
        kind = torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype("cuda")
    elif name in APART:
        sentence = f'torch.autocast("cuda") around {name} is not emulated; leave autocast there, or use its parts'
        refuse(sentence)
        raise NotImplementedError(sentence)
    else:
        return args, kwargs
    return to(args, kind), {key: to(value, kind) for key, value in kwargs.items()}
