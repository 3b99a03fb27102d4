"""Triton's CublasLt without cuBLAS: the same products by torch on the CPU, which tutorials compare theirs with."""

from __future__ import annotations

from types import ModuleType
from typing import Any

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class CublasLt:
    """Products of A (m, k) and B (n, k), both K-major: C = A B^T."""

    def __init__(self, workspace: Any) -> None: ...

    def matmul(self, a: Any, b: Any, c: Any) -> None:
        c.copy_((a.float() @ b.float().T).to(c.dtype))

    def gemm(self, a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float) -> None:
        d.copy_((alpha * (a.float() @ b.float().T) + beta * c.float()).to(d.dtype))

    def block_scaled_matmul_mxfp8(self, a: Any, b: Any, out: Any, a_scale: Any, b_scale: Any) -> None:
        """e4m3 with a ue8m0 scale for each 32 of K, scales in tiles of 128 x 4."""
        wide = [x.float() * rows_of((s.float() - 127).exp2(), 32, x.shape) for x, s in ((a, a_scale), (b, b_scale))]
        out.copy_((wide[0] @ wide[1].T).to(out.dtype))

    def block_scaled_matmul_nvfp4(self, a: Any, b: Any, out: Any, a_scale: Any, b_scale: Any) -> None:
        """e2m1, two to a byte, with an e4m3 scale for each 16 of K, scales in tiles of 128 x 4."""
        wide = []
        for codes, scale in ((a, a_scale), (b, b_scale)):
            values = codes.new_tensor(E2M1, dtype=out.float().dtype)
            nibbles = codes.unsqueeze(-1) // codes.new_tensor([1, 16]) % 16
            x = values[nibbles.long()].flatten(-2)
            wide.append(x * rows_of(scale.float(), 16, x.shape))
        out.copy_((wide[0] @ wide[1].T).to(out.dtype))


def rows_of(scales: Any, block: int, shape: Any) -> Any:
    """Scales for every element of a (rows, k) operand, from tiles of 128 rows x 4 blocks as tcgen05 reads them."""
    rows, k = shape
    tiles = scales.reshape(-(-rows // 128), -(-k // (4 * block)), 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(128 * tiles.shape[0], 4 * tiles.shape[1])
    return plain[:rows, : k // block].repeat_interleave(block, 1)


def without_cublas(libtriton: ModuleType) -> None:
    """A change of triton._C.libtriton."""
    vars(libtriton)["nvidia"].cublas.CublasLt = CublasLt
