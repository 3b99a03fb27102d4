"""A list of unlike products in one launch: every problem has its own M, N, K and tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from padless.arguments import check_readable, is_one_of, shown
from padless.formats import OUT_DTYPES, BlockScaledTensor
from padless.kernels.remembered import facts_of, known, remember
from padless.kernels.remembered import forget as forget
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host_list import PreparedList, prepare_list
from padless.kernels.table import kernels_arch
from padless.ops import traced
from padless.ops.checks import (
    as_one_group,
    check_alignment,
    check_operands,
    check_operands_of_kernel,
    describe,
    tensors_of,
)
from padless.ops.outputs import check_outputs
from padless.reference.gemm import gemm_reference
from padless.row_groups import is_traced
from padless.runtime.architecture import BLACKWELL
from padless.runtime.devices import BackendName, chosen_backend, device_of, is_capturing
from padless.runtime.driver import stream_of


def grouped_gemm_list(
    a: Sequence[BlockScaledTensor],
    b: Sequence[BlockScaledTensor],
    *,
    out: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    alpha: torch.Tensor | None = None,
    backend: BackendName | None = None,
    config: Sm100GroupedConfig | None = None,
) -> list[torch.Tensor]:
    """Multiplies problem by problem, out[i] = alpha[i] * a[i] @ b[i].T, in one launch. On Blackwell.

    Args:
        a: activations, (M_i, K_i); M_i may be 0, K_i is a multiple of 32 (FP8_BLOCK: 16).
        b: weights, (N_i, K_i), as many. All a have one format and all b one, a pair of docs/supported.md for Blackwell.
        out: (M_i, N_i) tensors of one dtype, all with contiguous rows that start on 16-byte boundaries (N_i a multiple
            of 16 bytes), or all with contiguous columns; None for new row-major ones. They share no memory with what
            the call reads, nor with one another.
        out_dtype: torch.bfloat16, float16 or float32, when ``out`` is None.
        alpha: (len(a),) float32, or None for 1.
        backend: "cuda", "emulator:sm_100a", "reference" or None: the GPU for tensors on a GPU, else the reference.
        config: the kernel to use in place of the one that is picked.

    Returns:
        ``out``.

    Tiled scales ("blocked") are read in place. What depends on the problems is copied to the device on the first call
    with these tensors; later ones are one launch. A row's bits are those of `gemm`. Verified by emulation, not measured.

    Raises:
        ValueError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    check_readable(a=a, b=b, out=out, alpha=alpha)
    outputs = _check(a, b, out, out_dtype, alpha)
    if outputs and is_traced(outputs[0]):
        return traced.products(a, b, outputs, alpha, backend, config)
    if config is not None and not isinstance(config, Sm100GroupedConfig):
        raise ValueError(f"config is a {type(config).__name__}; grouped_gemm_list takes a Sm100GroupedConfig")
    kept = [i for i, d in enumerate(outputs) if d.numel() > 0]
    if not kept:
        return outputs
    backend = chosen_backend(backend, outputs[0])
    if backend == "reference":
        _check_memory(a, b, outputs, alpha)
        for i in kept:
            _reference(a[i], b[i], outputs[i], None if alpha is None else alpha.view(-1)[i])
        return outputs
    driver = device_of(backend, outputs[0])
    if kernels_arch(driver.arch) != BLACKWELL.name:
        raise ValueError(f"backend {backend!r} is {driver.arch}; a list of problems needs Blackwell ({BLACKWELL.name})")
    for i in kept:
        try:
            check_operands_of_kernel(a[i], b[i])
            if outputs[i].stride(1) == 1 or outputs[i].shape[1] == 1:
                check_alignment("out", outputs[i])
        except ValueError as error:
            raise ValueError(f"problem {i}: {error}") from None
    facts = facts_of(("list", len(a), config), alpha, *outputs, *a, *b)
    prepared: PreparedList | None = known(facts)
    captured = is_capturing(outputs[0].device)
    if prepared is None:
        if captured:
            raise ValueError(
                "a CUDA graph is being captured and this list of problems is new, whose sizes have to be copied to the "
                "GPU first; call grouped_gemm_list once with these tensors before the capture, with out= and one-byte "
                "scales in layout 'blocked'"
            )
        _check_memory(a, b, outputs, alpha)
        some = torch.tensor(kept, device=outputs[0].device)
        alphas = alpha if alpha is None or len(kept) == len(a) else alpha.view(-1)[some].contiguous()
        prepared = prepare_list(
            driver, [a[i] for i in kept], [b[i] for i in kept], [outputs[i] for i in kept], alphas, config
        )
        if facts is not None and not prepared.copies and alphas is alpha:
            remember(facts, prepared)
    if captured:
        _CAPTURED[prepared.table.data_ptr()] = prepared.table
    prepared.kept.read()
    prepared.launch(stream_of(outputs[0]))
    return outputs


# Tables that CUDA graphs read, for as long as the process lives: less than a KiB for each problem. That the tensors of a
# list are gone does not say that the graph is: those made in its pool go while it is captured, and it writes to their
# memory at every replay. With freed operands only unused results are wrong, but a table whose memory is another's sends
# copies anywhere. What is known here is the stream, not the graph. Of a graph's end CUDA's user objects
# would tell, from a thread of the driver that may not call CUDA: more to get right than so few bytes are worth.
_CAPTURED: dict[int, torch.Tensor] = {}


def _reference(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, alpha: torch.Tensor | None) -> None:
    if alpha is None:
        gemm_reference(a, b, out=out)
    else:
        out.copy_(gemm_reference(a, b, out_dtype=torch.float32) * alpha)


def _check(
    a: Sequence[BlockScaledTensor], b: Sequence[BlockScaledTensor], out: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype, alpha: torch.Tensor | None,
) -> list[torch.Tensor]:  # fmt: skip
    """The outputs, made if there are none. Raises ValueError."""
    for name, given in (("a", a), ("b", b), ("out", out)):
        if not isinstance(given, Sequence) and (name != "out" or given is not None):
            raise ValueError(f"{name} must be a list with one for each problem, got {describe(given)}")
    if len(a) != len(b) or (out is not None and len(out) != len(a)):
        raise ValueError(f"a has {len(a)} problems, b {len(b)} and out {'none' if out is None else len(out)}")
    if alpha is not None and (
        not isinstance(alpha, torch.Tensor) or alpha.dtype != torch.float32 or alpha.shape != (len(a),)
    ):
        raise ValueError(f"alpha must be ({len(a)},) float32, got {describe(alpha)}")
    if out is None and not is_one_of(out_dtype, OUT_DTYPES):
        raise ValueError(f"out_dtype is {shown(out_dtype)}; allowed: torch.bfloat16, torch.float16, torch.float32")
    outputs: list[torch.Tensor] = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        try:
            _check_problem(x, y)
            if alpha is not None and alpha.device != x.device:
                raise ValueError(f"alpha is on {alpha.device} and a on {x.device}; they must be on one device")
            d = torch.empty((x.shape[0], y.shape[0]), dtype=out_dtype, device=x.device) if out is None else out[i]
            _check_output(x, y, d)
        except ValueError as error:
            raise ValueError(f"problem {i}: {error}") from None
        if d.dtype != (outputs or [d])[0].dtype or (x.format, y.format) != (a[0].format, b[0].format):
            raise ValueError(f"problem {i}: all problems of a list must have the same formats and output dtype")
        outputs.append(d)
    return outputs


def _check_memory(
    a: Sequence[BlockScaledTensor], b: Sequence[BlockScaledTensor], out: Sequence[torch.Tensor],
    alpha: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError for an output in the memory of an operand or of another output."""
    inputs: list[tuple[str, torch.Tensor | None]] = [("alpha", alpha)]
    for i, operands in enumerate(zip(a, b, strict=True)):
        for name, t in zip("ab", operands, strict=True):
            inputs += tensors_of(f"{name}[{i}]", t)
    check_outputs([(f"out[{i}]", t) for i, t in enumerate(out)], inputs)


def _check_problem(a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    weights = as_one_group(b)
    if isinstance(a, BlockScaledTensor) and a.scale_layout == "blocked_groups":
        raise ValueError("a has scales in layout 'blocked_groups'; a problem of a list is one group, use 'blocked'")
    check_operands("gemm", a, weights, None)


def _check_output(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor) -> None:
    shape = (a.shape[0], b.shape[0])
    if not isinstance(out, torch.Tensor) or out.dtype not in OUT_DTYPES or tuple(out.shape) != shape:
        raise ValueError(f"out must be {shape}, bfloat16, float16 or float32, got {describe(out)}")
    if out.device != a.device:
        raise ValueError(f"out is on {out.device} and a on {a.device}; they must be on one device")
    if out.stride(1) == 1 or out.shape[1] == 1:
        if shape[1] * out.element_size() % 16:
            raise ValueError(
                f"out has rows of {shape[1]} {out.dtype}; rows must be a multiple of 16 bytes, or columns contiguous"
            )
    elif out.stride(0) != 1 and shape[0] > 1:
        raise ValueError(f"out has strides {out.stride()}; its rows or its columns must be contiguous")
