"""DeepGEMM (github.com/deepseek-ai/DeepGEMM, 2.x): grouped GEMM on groups padded to 128 rows, masked GEMM, dense GEMM.

The padded contiguous layout takes the group of every row, -1 for padding, and skips a 64-row half tile that begins in
padding. It is given the exact number of padded rows, which a caller without a host synchronisation does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from padless.bench.pad import pad_groups, unpad_rows
from padless.bench.peers import Contender, Peer, hopper_or_reason, look_in, point_at_cuda_toolkit
from padless.bench.problem import GroupedProblem, masked_operand
from padless.formats import BlockScaledTensor, ceil_div, round_up

# The masked kernel stores whole tiles of up to 128 rows.
_MASKED_ROWS_MULTIPLE = 128


class DeepGemm(Peer):
    """The adapter; `folder`/deepgemm is searched before the environment."""

    name = "deepgemm"
    licence = "MIT"
    loading = "import deep_gemm"
    needs = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked", "fp8_gemm_nt")

    def obstacle(self) -> str:
        return hopper_or_reason() or point_at_cuda_toolkit()

    def load(self) -> Any:
        look_in(self._folder, "deepgemm")
        import deep_gemm

        return deep_gemm

    def grouped(self, problem: GroupedProblem) -> list[Contender]:
        gemm = self._library.m_grouped_fp8_gemm_nt_contiguous
        b = (problem.b.data, problem.b.scale)
        padded = problem.padded
        out = problem.empty_out(problem.padded_rows)
        a_row_major = problem.a_row_major
        buffers = problem.empty_padded(row_major=True)
        valid = problem.empty_out()

        def on_padded() -> None:
            # MN-major scales as it wants them: no transpose
            gemm((padded.a.data, padded.a.scale), b, out, padded.group_index, disable_ue8m0_cast=True)

        def with_padding() -> None:
            pad_groups(a_row_major, problem.offs, rows=problem.padded_rows, out=buffers)
            gemm((buffers.a.data, buffers.a.scale), b, out, buffers.group_index, disable_ue8m0_cast=True)

        def unpadded() -> torch.Tensor:
            return unpad_rows(out, problem.offs, valid)

        return [
            Contender("pad_then_deepgemm", with_padding, unpadded),
            Contender("deepgemm_on_padded", on_padded, unpadded, whole=False),
        ]

    def contiguous(
        self, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, ends: torch.Tensor, rows_a_group: int
    ) -> None:
        """out = a @ b, groups starting at multiples of 128 rows: no tile behind ends (G,) int32 is computed.

        a's scales are MN-major. rows_a_group, the mean, picks the tile. `padless.bench.peers.padded_layer` calls it.
        """
        self._library.m_grouped_fp8_gemm_nt_contiguous(
            (a.data, a.scale),
            (b.data, b.scale),
            out,
            ends,
            disable_ue8m0_cast=True,
            use_psum_layout=True,
            expected_m_for_psum_layout=rows_a_group,
        )

    def decode(self, problem: GroupedProblem) -> list[Contender]:
        rows = round_up(max(problem.sizes), _MASKED_ROWS_MULTIPLE)
        a, b = masked_operand(problem, rows), (problem.b.data, problem.b.scale)
        shape = (problem.point.groups, rows, problem.point.N)
        out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=problem.device)
        masked_m = torch.tensor(problem.sizes, dtype=torch.int32, device=problem.device)
        expected_m = ceil_div(problem.point.M, problem.point.groups)

        def masked() -> None:
            self._library.m_grouped_fp8_gemm_nt_masked(a, b, out, masked_m, expected_m, disable_ue8m0_cast=True)

        def valid() -> torch.Tensor:
            return torch.cat([out[group, :size] for group, size in enumerate(problem.sizes)])

        return [Contender("deepgemm_masked", masked, valid, buffer=out)]

    @property
    def k_grouped(self) -> Callable[..., Any] | None:
        """Its product along the tokens of each group, added to what is there; None in versions without it."""
        return getattr(self._library, "k_grouped_fp8_gemm_nt_contiguous", None)

    @property
    def has_programmatic_launches(self) -> bool:
        """Whether the library can be told how to launch."""
        return hasattr(self._library, "set_pdl") and hasattr(self._library, "get_pdl")

    @contextmanager
    def programmatic_launches(self, on: bool) -> Iterator[None]:
        """Its kernels may begin while the one ahead is ending, or (on is False) not; afterwards as it was before."""
        before = self._library.get_pdl()
        self._library.set_pdl(on)
        try:
            yield
        finally:
            self._library.set_pdl(before)

    def dense(self, problem: GroupedProblem) -> list[Contender]:
        out = problem.empty_out()
        a, b = (problem.a.data, problem.a.scale), (problem.b.data[0], problem.b.scale[0])

        def dense() -> None:
            self._library.fp8_gemm_nt(a, b, out, disable_ue8m0_cast=True)

        return [Contender("deepgemm", dense, lambda: out)]
