"""`GroupedGemmQuant`: the class form of grouped_gemm_quant, on buffers of the caller's, with cuDNN's method names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from padless.arguments import check_readable, is_one_of, shown
from padless.compat.cudnn.keywords import check_others
from padless.compat.cudnn.operands import GATE_UP, NAMES, SEMANTICS, Bound, Inputs, Kind, Operands
from padless.compat.cudnn.request import D_DTYPES, FORMAT_OF_DTYPE, Stream, stream_handle
from padless.epilogue import COLUMN_FORMATS, NORM_CONST_RULES, Epilogue, EpilogueTensors, column_tiles
from padless.formats import BlockScaledFormat, ceil_div
from padless.kernels.launch import KernelChoice
from padless.ops.checks import check_rows, describe
from padless.ops.epilogue_checks import check_outputs_apart
from padless.ops.epilogue_run import check_columns, check_tensor, compute, prepare
from padless.runtime.choices import BackendName, Semantics, SwigluGateUp
from padless.runtime.streams import on_stream


@dataclass(frozen=True, eq=False, kw_only=True)
class Buffers(Inputs):
    """Operands and outputs of one execution, in the words of `execute`, and the options of the class."""

    d_tensor: torch.Tensor
    d_col_tensor: torch.Tensor | None
    sfd_row_tensor: torch.Tensor | None
    sfd_col_tensor: torch.Tensor | None
    amax_tensor: torch.Tensor | None
    gate_up: str | None

    def tensors(self) -> dict[str, object]:
        """The tensors by name, None for those that were not given."""
        return {name: getattr(self, name) for name in _TENSORS}

    def bind(self) -> Bound:
        """Operands in padless's words, checked. Raises ValueError."""
        self.check_fixed()
        operands = self.operands()
        if not operands.as_cudnn:
            raise ValueError("sample_b must be a tensor (N, K, G); for BlockScaledTensors call grouped_gemm_quant")
        if operands.flat:
            raise ValueError(f"sample_a must be (M, K, 1), got {describe(self.a_tensor)}")
        epilogue = self.epilogue()
        operands.check()
        check_columns(epilogue, operands.n, "b_tensor")
        numbers = self.numbers(operands, epilogue)
        return Bound(operands, epilogue, self._with_outputs(numbers, operands, epilogue))

    def epilogue(self) -> Epilogue:
        """The epilogue that the given outputs ask for. Raises ValueError."""
        d, gate_up = self.d_tensor, self.gate_up
        if not isinstance(d, torch.Tensor) or d.dtype not in (*D_DTYPES, *FORMAT_OF_DTYPE):
            allowed = ", ".join(map(str, (*D_DTYPES, *FORMAT_OF_DTYPE)))
            raise ValueError(f"d_tensor must be a (M, N, 1) tensor, {allowed}, got {describe(d)}")
        if not is_one_of(gate_up, (None, *GATE_UP)):
            raise ValueError(f"gate_up is {shown(gate_up)}; allowed: None, {', '.join(map(repr, GATE_UP))}")
        format = FORMAT_OF_DTYPE.get(d.dtype)
        has_column = self.d_col_tensor is not None
        if has_column != (self.sfd_col_tensor is not None):
            raise ValueError("d_col_tensor and sfd_col_tensor must be given both or neither")
        if format is None and (has_column or self.sfd_row_tensor is not None):
            raise ValueError(f"d_tensor is {d.dtype}, which has no scales; sfd_row, d_col and sfd_col must be None")
        if format is not None and (self.sfd_row_tensor is None or self.norm_const_tensor is None):
            missing = "sfd_row_tensor" if self.sfd_row_tensor is None else "norm_const_tensor"
            raise ValueError(
                f"{missing} is None; sfd_row and norm_const are needed with {d.dtype} (ones for no effect)"
            )
        if has_column and format not in COLUMN_FORMATS:
            raise ValueError(f"d_col_tensor must be None for {d.dtype}; only FP8 is quantized along columns")
        column_layout = "blocked_groups" if self.discrete_col_sfd else "blocked"
        return self.epilogue_of(
            gate_up,
            amax=self.amax_tensor is not None,
            d_dtype=d.dtype if format is None else None,
            row_format=format,
            row_layout="plain" if format is None else "blocked",
            column_format=format if has_column else None,
            column_layout=column_layout if has_column else "plain",
            scale_rule="" if format is None else NORM_CONST_RULES[SEMANTICS.index(self.semantics)],
        )

    def _with_outputs(self, numbers: EpilogueTensors, operands: Operands, epilogue: Epilogue) -> EpilogueTensors:
        m, groups, device = operands.m, operands.num_groups, operands.device
        n_out, d, format = epilogue.out_columns(operands.n), self.d_tensor, epilogue.row_format
        t = numbers
        if epilogue.amax:
            amax = check_tensor("amax_tensor", self.amax_tensor, (groups, 1), (torch.float32,), device)
            if not amax.is_contiguous():
                raise ValueError(f"amax_tensor has strides {amax.stride()}; it must be contiguous; call .contiguous()")
            t = replace(t, amax=amax[:, 0])
        shape = (m, n_out // (1 if format is None else format.codes_per_byte), 1)
        rows = _rows("d_tensor", check_tensor("d_tensor", d, shape, (d.dtype,), device))
        if format is None:
            return replace(t, d=rows)
        columns = ceil_div(ceil_div(n_out, format.block_k), 4)
        scale = _tiles("sfd_row_tensor", self.sfd_row_tensor, (ceil_div(m, 128), columns), format, device)
        t = replace(t, row_codes=rows, row_scale=scale)
        if epilogue.column_format is None:
            return t
        d_col = check_tensor("d_col_tensor", self.d_col_tensor, (m, n_out, 1), (d.dtype,), device)
        column_codes = _rows("d_col_tensor", d_col)
        sfd_col = self.sfd_col_tensor
        needed = column_tiles(m, groups, self.m_aligned)
        room = sfd_col.shape[4] if isinstance(sfd_col, torch.Tensor) and sfd_col.dim() == 6 else needed
        if room < needed:
            raise ValueError(
                f"sfd_col_tensor has {room} column tiles; {groups} groups of {m} rows that end anywhere can need "
                f"{needed}. Give it shape (32, 4, {ceil_div(n_out, 128)}, 4, {needed}, 1), or pass m_aligned=256 "
                "if every end offset is a multiple of 256"
            )
        tiles = (ceil_div(n_out, 128), room)
        scale = _tiles("sfd_col_tensor", sfd_col, tiles, epilogue.column_format, device)
        return replace(t, column_codes=column_codes, column_scale=scale, column_tiles=room)


# Of Buffers: what `execute` takes anew.
_TENSORS = (
    *("a_tensor", "b_tensor", "d_tensor", "sfa_tensor", "sfb_tensor", "padded_offsets", "alpha_tensor"),
    *("d_col_tensor", "sfd_row_tensor", "sfd_col_tensor", "amax_tensor", "norm_const_tensor", "prob_tensor"),
    "bias_tensor",
)


class GroupedGemmQuant:
    """One kind of call: cuDNN's 3-D tensors of fixed types, N, K and G, and any M; check_support, compile, execute.

    sample_*: tensors like those that execute will get; shapes as in `grouped_gemm_quant`, outputs as it returns them:
        sample_d: (M, N_out, 1), values or codes, strides (N_out, 1, ..). FP4 (M, N_out / 2, 1).
        sample_d_col, sample_sfd_col: column codes and scales, both or neither.
        sample_sfd_row: row scales. Needed, with sample_norm_const, where sample_d has codes.
        sample_amax: (G, 1) float32. execute raises what is in it: fill it with -inf first.
        sample_prob, sample_alpha, sample_bias: None leaves the factor or the summand out.
    m_aligned: what every end offset is a multiple of. It decides how many column tiles sample_sfd_col needs.
    gate_up: "concatenated" or "interleaved" for SwiGLU, None for none.
    Other arguments as in grouped_gemm_quant.
    """

    def __init__(
        self,
        *,
        sample_a: torch.Tensor,
        sample_b: torch.Tensor,
        sample_d: torch.Tensor,
        sample_sfa: torch.Tensor,
        sample_sfb: torch.Tensor,
        sample_padded_offsets: torch.Tensor,
        sample_alpha: torch.Tensor | None = None,
        sample_d_col: torch.Tensor | None = None,
        sample_sfd_row: torch.Tensor | None = None,
        sample_sfd_col: torch.Tensor | None = None,
        sample_amax: torch.Tensor | None = None,
        sample_norm_const: torch.Tensor | None = None,
        sample_prob: torch.Tensor | None = None,
        sample_bias: torch.Tensor | None = None,
        acc_dtype: torch.dtype | None = None,
        sf_vec_size: int | None = None,
        m_aligned: int = 1,
        discrete_col_sfd: bool = False,
        gate_up: SwigluGateUp | None = None,
        semantics: Semantics = "implementation",
        backend: BackendName | None = None,
        config: KernelChoice | None = None,
        **others: Any,
    ) -> None:
        check_others("GroupedGemmQuant", others)
        self._options: dict[str, Any] = {
            "acc_dtype": acc_dtype, "sf_vec_size": sf_vec_size, "m_aligned": m_aligned,
            "discrete_col_sfd": discrete_col_sfd, "gate_up": gate_up, "semantics": semantics,
        }  # fmt: skip
        self._samples: Buffers | None = Buffers(
            a_tensor=sample_a, b_tensor=sample_b, d_tensor=sample_d, sfa_tensor=sample_sfa, sfb_tensor=sample_sfb,
            padded_offsets=sample_padded_offsets, alpha_tensor=sample_alpha, d_col_tensor=sample_d_col,
            sfd_row_tensor=sample_sfd_row, sfd_col_tensor=sample_sfd_col, amax_tensor=sample_amax,
            norm_const_tensor=sample_norm_const, prob_tensor=sample_prob, bias_tensor=sample_bias, **self._options,
        )  # fmt: skip
        samples = self._samples.tensors()
        check_readable(**{"sample_" + name.removesuffix("_tensor"): t for name, t in samples.items()})
        self._given = {name for name, t in samples.items() if t is not None}
        self._backend, self._config = backend, config
        self._kind: Kind | None = None

    def check_support(self) -> bool:
        """True, or a ValueError that says what is not supported and what is. Nothing is compiled."""
        if self._samples is not None:
            self._kind = self._samples.bind().kind
        return True

    def compile(self) -> None:
        """Compiles the kernel for the samples, and lets go of them; nothing to do for the reference backend."""
        if self._samples is not None:
            bound = self._samples.bind()
            self._kind, o = bound.kind, bound.operands
            prepare(o.a, o.b, o.offs, bound.epilogue, bound.tensors, self._backend, self._config)
            self._samples = None

    def execute(
        self,
        *,
        a_tensor: torch.Tensor,
        b_tensor: torch.Tensor,
        d_tensor: torch.Tensor,
        sfa_tensor: torch.Tensor,
        sfb_tensor: torch.Tensor,
        padded_offsets: torch.Tensor,
        alpha_tensor: torch.Tensor | None = None,
        d_col_tensor: torch.Tensor | None = None,
        sfd_row_tensor: torch.Tensor | None = None,
        sfd_col_tensor: torch.Tensor | None = None,
        amax_tensor: torch.Tensor | None = None,
        norm_const_tensor: torch.Tensor | None = None,
        prob_tensor: torch.Tensor | None = None,
        bias_tensor: torch.Tensor | None = None,
        current_stream: Stream = None,
    ) -> None:
        """Computes into the outputs given. They and the operands are of the samples' types, N, K and G."""
        given = Buffers(
            a_tensor=a_tensor, b_tensor=b_tensor, d_tensor=d_tensor, sfa_tensor=sfa_tensor, sfb_tensor=sfb_tensor,
            padded_offsets=padded_offsets, alpha_tensor=alpha_tensor, d_col_tensor=d_col_tensor,
            sfd_row_tensor=sfd_row_tensor, sfd_col_tensor=sfd_col_tensor, amax_tensor=amax_tensor,
            norm_const_tensor=norm_const_tensor, prob_tensor=prob_tensor, bias_tensor=bias_tensor, **self._options,
        )  # fmt: skip
        check_readable(**given.tensors())
        if self._samples is not None or self._kind is None:
            self.check_support()
            raise RuntimeError("call compile() first")
        for name, t in given.tensors().items():
            if (t is not None) != (name in self._given):
                without = "with" if name in self._given else "without"
                raise ValueError(f"{name} is {describe(t)}; the samples came {without} one, so must this call")
        with on_stream("current_stream", stream_handle(current_stream), a_tensor):
            bound, expected = given.bind(), self._kind
            if bound.kind != expected:
                (epilogue, formats, sizes), (was, their_formats, their_sizes) = bound.kind, expected
                raise ValueError(
                    f"the tensors differ from the samples: b is {sizes} and was {their_sizes}, formats "
                    f"{[f.name for f in formats]} and were {[f.name for f in their_formats]}, {epilogue} and was {was}"
                )
            o = bound.operands
            check_outputs_apart(o.a, o.b, o.offs, bound.tensors, NAMES)
            compute(o.a, o.b, o.offs, bound.epilogue, bound.tensors, self._backend, self._config, given.m_aligned)


def _rows(name: str, t: torch.Tensor) -> torch.Tensor:
    """(M, N) of (M, N, 1)."""
    rows = t[:, :, 0]
    check_rows(name, rows)
    return rows


def _tiles(
    name: str, view: object, tiles: tuple[int, int], format: BlockScaledFormat, device: torch.device
) -> torch.Tensor:
    """The bytes under a 6-D view, (bytes,)."""
    rows, columns = tiles
    t = check_tensor(name, view, (32, 4, rows, 4, columns, 1), (format.scale_dtype,), device)
    strides = (16, 4, 512 * columns, 1, 512)
    wrong = any(s != w for s, w, size in zip(t.stride(), strides, t.shape, strict=False) if size > 1)
    if wrong and t.numel() > 0:
        raise ValueError(f"{name} has strides {t.stride()}; 32x4x4 tiles have {strides} (see layouts.cudnn_view)")
    return t.as_strided((t.numel(),), (1,))
