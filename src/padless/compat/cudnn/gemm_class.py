"""`GroupedGemmQuant`: the class form of grouped_gemm_quant, on buffers of the caller's, with cuDNN's method names."""

from __future__ import annotations

from typing import Any

import torch

from padless.compat.cudnn.calls import (
    D_DTYPES,
    FORMAT_OF_DTYPE,
    GATE_UP,
    SEMANTICS,
    check_fixed,
    stream_handle,
)
from padless.compat.cudnn.operands import Operands, operands_of
from padless.epilogue import COLUMN_FORMATS, NORM_CONST_RULES, Epilogue, EpilogueTensors, column_tiles
from padless.formats import BlockScaledFormat, ceil_div
from padless.gradients import refuse_gradients
from padless.kernels.launch import KernelChoice
from padless.ops.checks import check_rows, describe
from padless.ops.grouped_gemm_epilogue import check, check_tensor, prepare, run

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
        acc_dtype: torch.dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] | None = None,
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int | None = None,
        vector_f32: bool = False,
        m_aligned: int = 1,
        discrete_col_sfd: bool = False,
        gate_up: str | None = None,
        semantics: str = "implementation",
        backend: str | None = None,
        config: KernelChoice | None = None,
    ) -> None:
        given = locals()
        refuse_gradients(**given)
        self._samples = {name: given["sample_" + name.removesuffix("_tensor")] for name in _TENSORS}
        self._m_aligned = m_aligned
        self._options = {
            "acc_dtype": acc_dtype,
            "cd_major": "n",
            "sf_vec_size": sf_vec_size,
            "discrete_col_sfd": discrete_col_sfd,
            "gate_up": gate_up,
            "semantics": semantics,
        }
        self._backend, self._config = backend, config
        self._epilogue: Epilogue | None = None
        self._formats: tuple[BlockScaledFormat, ...] = ()
        self._compiled = False

    def check_support(self) -> bool:
        """True, or a ValueError that says what is not supported and what is. Nothing is compiled."""
        operands, epilogue, _ = self._bind(self._samples)
        self._epilogue = epilogue
        self._formats = (operands.a.format, operands.b.format)  # type: ignore[union-attr]
        self._sizes = tuple(operands.b.data.shape)
        return True

    def compile(self) -> None:
        """Compiles the kernel for the samples; nothing to do for the reference backend."""
        self._checked()
        operands, epilogue, tensors = self._bind(self._samples)
        prepare(operands.a, operands.b, operands.offs, epilogue, tensors, self._backend, self._config)
        self._compiled = True

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
        current_stream: Any = None,
    ) -> None:
        """Computes into the outputs given. They and the operands are of the samples' types, N, K and G."""
        given = locals()
        refuse_gradients(**given)
        expected = self._checked()
        if not self._compiled:
            raise RuntimeError("call compile() first")
        tensors_given = {name: given[name] for name in _TENSORS}
        for name, t in tensors_given.items():
            if (t is None) != (self._samples[name] is None):
                without = "without" if self._samples[name] is None else "with"
                raise ValueError(
                    f"{name} is {describe(t)}; the samples came {without} one, so must this call"
                )
        operands, epilogue, tensors = self._bind(tensors_given)
        formats = (operands.a.format, operands.b.format)  # type: ignore[union-attr]
        sizes = tuple(operands.b.data.shape)
        if (epilogue, formats, sizes) != (expected, self._formats, self._sizes):
            raise ValueError(
                f"the tensors differ from the samples: b is {sizes} and was {self._sizes}, formats "
                f"{[f.name for f in formats]} and were {[f.name for f in self._formats]}, {epilogue} and was {expected}"
            )
        stream = stream_handle(current_stream)
        run(operands.a, operands.b, operands.offs, epilogue, tensors, self._backend, self._config, stream)

    def _checked(self) -> Epilogue:
        if self._epilogue is None:
            self.check_support()
        assert self._epilogue is not None
        return self._epilogue

    def _bind(self, given: dict[str, Any]) -> tuple[Operands, Epilogue, EpilogueTensors]:
        """Operands, epilogue and tensors of a set of arguments, everything checked."""
        check_fixed(self._options)
        operands = operands_of(given | self._options)
        if not operands.as_cudnn:
            raise ValueError(
                "sample_b must be a tensor (N, K, G); for BlockScaledTensors call grouped_gemm_quant"
            )
        epilogue = _epilogue(given, self._options)
        check(operands.a, operands.b, operands.offs, epilogue)
        numbers = operands.numbers(given, epilogue)
        return operands, epilogue, EpilogueTensors(**numbers, **self._outputs(given, operands, epilogue))

    def _outputs(self, given: dict[str, Any], operands: Operands, epilogue: Epilogue) -> dict[str, Any]:
        (groups, n), m = operands.b.data.shape[:2], operands.a.shape[0]
        device, n_out = operands.a.device, epilogue.out_columns(n)
        new: dict[str, Any] = {}
        if epilogue.amax:
            amax = check_tensor("amax_tensor", given["amax_tensor"], (groups, 1), (torch.float32,), device)
            new["amax"] = amax[:, 0]
        d = given["d_tensor"]
        format = epilogue.row_format
        if format is None:
            shape = (m, n_out, 1)
            new["d"] = _rows("d_tensor", check_tensor("d_tensor", d, shape, (d.dtype,), device))
            return new
        shape = (m, n_out // format.codes_per_byte, 1)
        new["row_codes"] = _rows("d_tensor", check_tensor("d_tensor", d, shape, (d.dtype,), device))
        columns = ceil_div(ceil_div(n_out, format.block_k), 4)
        new["row_scale"] = _tiles(
            "sfd_row_tensor", given["sfd_row_tensor"], (ceil_div(m, 128), columns), format, device
        )
        if epilogue.column_format is not None:
            d_col = check_tensor("d_col_tensor", given["d_col_tensor"], (m, n_out, 1), (d.dtype,), device)
            new["column_codes"] = _rows("d_col_tensor", d_col)
            sfd_col = given["sfd_col_tensor"]
            needed = column_tiles(m, groups, self._m_aligned)
            room = sfd_col.shape[4] if isinstance(sfd_col, torch.Tensor) and sfd_col.dim() == 6 else needed
            if room < needed:
                raise ValueError(
                    f"sfd_col_tensor has {room} column tiles; {groups} groups of {m} rows that end anywhere can need "
                    f"{needed}. Give it shape (32, 4, {ceil_div(n_out, 128)}, 4, {needed}, 1), or pass m_aligned=256 "
                    "if every end offset is a multiple of 256"
                )
            new["column_tiles"] = room
            new["column_scale"] = _tiles(
                "sfd_col_tensor", sfd_col, (ceil_div(n_out, 128), room), epilogue.column_format, device
            )
        return new


def _epilogue(given: dict[str, Any], options: dict[str, Any]) -> Epilogue:
    d, gate_up = given["d_tensor"], options["gate_up"]
    if not isinstance(d, torch.Tensor) or d.dtype not in (*D_DTYPES, *FORMAT_OF_DTYPE):
        allowed = ", ".join(map(str, (*D_DTYPES, *FORMAT_OF_DTYPE)))
        raise ValueError(f"d_tensor must be a (M, N, 1) tensor, {allowed}, got {describe(d)}")
    if gate_up is not None and gate_up not in GATE_UP:
        raise ValueError(f"gate_up is {gate_up!r}; allowed: None, {', '.join(map(repr, GATE_UP))}")
    format = FORMAT_OF_DTYPE.get(d.dtype)
    has_column = given["d_col_tensor"] is not None
    if has_column != (given["sfd_col_tensor"] is not None):
        raise ValueError("d_col_tensor and sfd_col_tensor must be given both or neither")
    scales = [name for name in ("sfd_row_tensor", "norm_const_tensor") if given[name] is not None]
    if format is None and (has_column or "sfd_row_tensor" in scales):
        raise ValueError(
            f"d_tensor is {d.dtype}, which has no scales; sfd_row, d_col and sfd_col must be None"
        )
    if format is not None and len(scales) != 2:
        missing = next(n for n in ("sfd_row_tensor", "norm_const_tensor") if n not in scales)
        raise ValueError(
            f"{missing} is None; sfd_row and norm_const are needed with {d.dtype} (ones for no effect)"
        )
    if has_column and format not in COLUMN_FORMATS:
        raise ValueError(f"d_col_tensor must be None for {d.dtype}; only FP8 is quantised along columns")
    activation = "none" if gate_up is None else GATE_UP[gate_up]
    gated_bias = activation == "none" and options["semantics"] == "implementation"
    return Epilogue(
        alpha=given["alpha_tensor"] is not None,
        bias=given["bias_tensor"] is not None,
        prob=given["prob_tensor"] is not None,
        bias_rule="gated_bias" if gated_bias else "gated_sum",
        activation=activation,
        amax=given["amax_tensor"] is not None,
        d_dtype=d.dtype if format is None else None,
        row_format=format,
        row_layout="plain" if format is None else "blocked",
        column_format=format if has_column else None,
        column_layout=("blocked_groups" if options["discrete_col_sfd"] else "blocked")
        if has_column
        else "plain",
        scale_rule="" if format is None else NORM_CONST_RULES[SEMANTICS.index(options["semantics"])],
    )


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
        raise ValueError(
            f"{name} has strides {t.stride()}; 32x4x4 tiles have {strides} (see layouts.cudnn_view)"
        )
    return t.as_strided((t.numel(),), (1,))
