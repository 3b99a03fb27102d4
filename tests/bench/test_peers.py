"""Peers' adapters: what they say when a library is missing, and that they hand over the layouts that it
documents.

The libraries themselves are not here; stand-ins with the same entry points compute from those layouts,
element by element, so a wrong layout gives a wrong product.
"""

from __future__ import annotations

import itertools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import padless
from padless.bench import peers, problem
from padless.bench.cases.problems.layer import LayerPoint, make_layer
from padless.bench.group_sizes import DenseShape, Point
from padless.bench.peers import deepgemm, find, monomoe, mslk, tma_adaptive, torch_ops
from support.deepgemm import product, stand_in_deepgemm
from support.ragged import ROOT

SIZES = [37, 0, 129, 3]
POINT = Point(sum(SIZES), 136, 384, 4)


@pytest.fixture(scope="module")
def grouped() -> problem.GroupedProblem:
    return problem.make_grouped(POINT, SIZES, 11, "cpu")


@pytest.fixture(scope="module")
def expected(grouped: problem.GroupedProblem) -> torch.Tensor:
    return padless.grouped_gemm(grouped.a, grouped.b, grouped.offs).double()


def agree(contender: peers.Contender, expected: torch.Tensor) -> None:
    contender.call()
    assert contender.output is not None
    out = contender.output().double()
    assert out.shape == expected.shape
    error = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) <= contender.tolerance


# --- DeepGEMM --------------------------------------------------------------------------------------------


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> deepgemm.DeepGemm:
    monkeypatch.setattr(deepgemm, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(deepgemm, "point_at_cuda_toolkit", lambda: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in_deepgemm())
    peer = deepgemm.DeepGemm(None)
    assert peer.missing() == ""
    assert peer.version() == "2.6.1"
    return peer


def test_deepgemm_gets_padded_groups(
    deep_gemm: deepgemm.DeepGemm, grouped: problem.GroupedProblem, expected: torch.Tensor
) -> None:
    contenders = {contender.name: contender for contender in deep_gemm.grouped(grouped)}
    assert set(contenders) == {"pad_then_deepgemm", "deepgemm_on_padded"}
    for contender in contenders.values():
        agree(contender, expected)
    assert contenders["pad_then_deepgemm"].whole
    assert not contenders["deepgemm_on_padded"].whole


def test_deepgemm_masked_and_dense(
    deep_gemm: deepgemm.DeepGemm, grouped: problem.GroupedProblem, expected: torch.Tensor
) -> None:
    (masked,) = deep_gemm.decode(grouped)
    agree(masked, expected)
    shape = problem.make_dense(DenseShape(40, 136, 384), 2, "cpu")
    (dense,) = deep_gemm.dense(shape)
    agree(dense, padless.gemm(shape.a, shape.b[0]).double())


def test_an_old_deepgemm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(deepgemm, "point_at_cuda_toolkit", lambda: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    answer = deepgemm.DeepGemm(None).missing()
    assert "has no m_grouped_fp8_gemm_nt_contiguous" in answer


# --- the paper's code ------------------------------------------------------------------------------------

_PACKAGE = """
from .jit_kernels.m_grouped_gemm_TMA_adaptive import m_grouped_TMA_adaptive_gemm_fp8_fp8_bf16_nt_contiguous
"""
_MODULE = """
import torch
from ..helper import scale_up

class Runtime:
    launches = 0

    def __call__(self, lhs, lhs_scales, rhs, rhs_scales, out, sizes):
        Runtime.launches += 1
        start = 0
        for group, size in enumerate(sizes.tolist()):
            rows = slice(start, start + size)
            a = lhs[rows].float() * scale_up(lhs_scales[rows], 1, lhs.shape[1])
            b = rhs[group].float() * scale_up(rhs_scales[group], 128, rhs.shape[2])[: rhs.shape[1]]
            out[rows] = (a @ b.t()).to(out.dtype)
            start += size

class Tuner:
    def compile_and_tune(self, name, args):
        return Runtime()

jit_tuner = Tuner()

def m_grouped_TMA_adaptive_gemm_fp8_fp8_bf16_nt_contiguous(lhs, rhs, size_per_group):
    assert size_per_group.dtype == torch.int64
    out = torch.empty(lhs[0].shape[0], rhs[0].shape[1], dtype=torch.bfloat16)
    args = (*lhs, *rhs, out, size_per_group)
    runtime = jit_tuner.compile_and_tune(name="gemm", args=args)
    runtime(*args)
    return out
"""
_HELPER = """
def scale_up(scale, rows, columns):
    return scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)[:, :columns]
"""


@pytest.fixture
def paper_folder(tmp_path: Path) -> Iterator[Path]:
    package = tmp_path / "tma_adaptive" / "deep_gemm"
    (package / "jit_kernels").mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "helper.py").write_text(_HELPER)
    (package / "jit_kernels" / "__init__.py").write_text("")
    (package / "jit_kernels" / "m_grouped_gemm_TMA_adaptive.py").write_text(_MODULE)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(tma_adaptive._ALIAS)]:
        del sys.modules[name]


def test_the_papers_code_is_loaded_under_another_name_and_its_launch_replayed(
    paper_folder: Path, monkeypatch: pytest.MonkeyPatch, grouped: problem.GroupedProblem, expected: torch.Tensor
) -> None:
    monkeypatch.setattr(tma_adaptive, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(tma_adaptive, "point_at_cuda_toolkit", lambda: "")
    peer = tma_adaptive.TmaAdaptive(paper_folder)
    assert peer.missing() == ""
    assert "deep_gemm" not in sys.modules
    whole, kernel = peer.grouped(grouped)
    agree(whole, expected)
    assert kernel.output is not None
    kernel.output().fill_(float("nan"))
    agree(kernel, expected)
    assert (whole.whole, kernel.whole) == (True, False)
    # The recorder has left: the library's own tuner is back, and the kernel alone makes one launch.
    module = sys.modules[f"{tma_adaptive._ALIAS}.jit_kernels.m_grouped_gemm_TMA_adaptive"]
    assert type(module.jit_tuner).__name__ == "Tuner"
    before = module.Runtime.launches
    kernel.call()
    assert module.Runtime.launches == before + 1


def test_a_broken_package_leaves_nothing_behind(paper_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tma_adaptive, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(tma_adaptive, "point_at_cuda_toolkit", lambda: "")
    (paper_folder / "tma_adaptive" / "deep_gemm" / "helper.py").write_text("raise OSError('no nvcc')")
    answer = tma_adaptive.TmaAdaptive(paper_folder).missing()
    assert "OSError: no nvcc" in answer
    assert not [name for name in sys.modules if name.startswith(tma_adaptive._ALIAS)]
    assert "no folder" in tma_adaptive.TmaAdaptive(paper_folder / "nowhere").missing()


# --- MSLK and torch --------------------------------------------------------------------------------------


def test_mslk_scales_are_grouped_and_mn_major(grouped: problem.GroupedProblem) -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert mslk.grouped_mn_major(scale, [2, 1]).flatten().tolist() == [1, 3, 2, 4, 5, 6]
    flat = mslk.grouped_mn_major(grouped.a.scale, SIZES).flatten()
    k_blocks, start = 3, 0
    for size in SIZES:
        for row in range(size):
            for block in range(k_blocks):
                at = start * k_blocks + block * size + row
                assert flat[at] == grouped.a.scale[start + row, block]
        start += size


def test_mslk_contender(
    monkeypatch: pytest.MonkeyPatch, grouped: problem.GroupedProblem, expected: torch.Tensor
) -> None:
    def operator(xq: Any, wq: Any, x_scale: Any, w_scale: Any, m_sizes: Any) -> torch.Tensor:
        assert x_scale.is_contiguous()
        assert w_scale.shape == (4, 3, 2)
        assert w_scale.is_contiguous()
        assert m_sizes.dtype == torch.int64
        parts, start = [], 0
        for group, size in enumerate(m_sizes.tolist()):
            mine = x_scale.flatten()[start * 3 : (start + size) * 3].view(3, size).t()
            rows = xq[start : start + size]
            parts.append(product(rows, mine, wq[group], w_scale[group].t()))
            start += size
        return torch.cat(parts).to(torch.bfloat16)

    namespace = types.SimpleNamespace(f8f8bf16_groupwise_grouped=operator)
    monkeypatch.setattr(mslk, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(mslk.torch, "ops", types.SimpleNamespace(mslk=namespace))
    library = types.ModuleType("mslk")
    library.__version__ = "1.1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mslk", library)
    peer = mslk.Mslk(None)
    assert not peer.missing()
    (contender,) = peer.grouped(grouped)
    agree(contender, expected)
    (contender,) = peer.decode(grouped)
    agree(contender, expected)
    assert peer.dense(problem.make_dense(DenseShape(8, 8, 16), 0, "cpu")) == []


def test_rowwise_codes_decode_to_the_values(grouped: problem.GroupedProblem) -> None:
    x, w = grouped.values()
    for values in (x, w):
        codes, scale = torch_ops.rowwise(values)
        assert scale.shape == values.shape[:-1]
        error = codes.float() * scale[..., None] - values.float()
        assert float((error.norm(dim=-1) / values.float().norm(dim=-1)).max()) < 0.04


def test_cublaslt_weight_scales_are_k_major_and_padded() -> None:
    scale = torch.arange(6.0).view(2, 3)
    got = torch_ops.cublaslt_weight_scale(scale)
    assert got.shape == (4, 2)
    assert got.stride() == (1, 4)
    assert torch.equal(got[:3], scale.t())
    assert torch_ops.cublaslt_weight_scale(torch.zeros(2, 8)).shape == (8, 2)


def test_torch_entry_points_exist() -> None:
    for name in ("_scaled_grouped_mm", "_grouped_mm", "_scaled_mm"):
        assert hasattr(torch, name)
    assert {"BlockWise1x128", "BlockWise128x128"} <= set(torch.nn.functional.ScalingType.__members__)


# --- finding them ----------------------------------------------------------------------------------------


def test_every_peer_says_why_it_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: peers may be usable")
    for peer in find.find_peers():
        answer = peer.missing()
        assert "needs a CUDA GPU" in answer


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (deepgemm, mslk):
        monkeypatch.setattr(module, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(deepgemm, "point_at_cuda_toolkit", lambda: "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("deep_gemm", "mslk"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert "import deep_gemm: " in deepgemm.DeepGemm(tmp_path).missing()
    assert "import mslk: " in mslk.Mslk(tmp_path).missing()


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in find.find_peers()] == ["deepgemm", "tma_adaptive", "mslk", "torch"]
    assert [peer.name for peer in find.find_peers(names=["torch", "torchao", "mslk"])] == ["mslk", "torchao", "torch"]


def test_the_default_folder_is_used_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find.resolve_folder(None) is None
    (tmp_path / ".peers").mkdir()
    assert find.resolve_folder(None) == tmp_path / ".peers"
    assert find.resolve_folder(str(tmp_path)) == tmp_path


def test_the_toolkit_is_found_beside_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/somewhere")
    assert peers.point_at_cuda_toolkit() == ""
    monkeypatch.delenv("CUDA_HOME")
    for part in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / "toolkit" / part).parent.mkdir(parents=True)
        (tmp_path / "toolkit" / part).touch()
    monkeypatch.setattr(peers.shutil, "which", lambda _: str(tmp_path / "toolkit" / "bin" / "nvcc"))
    assert peers.point_at_cuda_toolkit() == ""
    assert peers.os.environ["CUDA_HOME"] == str(tmp_path / "toolkit")
    monkeypatch.delenv("CUDA_HOME")


@pytest.mark.gpu
def test_peers_that_are_there_compute_the_product() -> None:
    """Whatever is installed agrees with the float64 reference row by row."""
    from padless.bench.measure import gather
    from padless.testing.judge import check

    sizes = [130, 7, 1, 374, 256]
    made = problem.make_grouped(Point(sum(sizes), 512, 1024, len(sizes)), sizes, 5, "cuda")
    usable = [peer for peer in find.find_peers() if not peer.missing()]
    assert "torch" in [peer.name for peer in usable]
    contenders, errors = gather([], usable, lambda peer: peer.grouped(made))
    _, record = check(contenders, problem.sample_reference(made), errors)
    assert record["wrong"] == {}
    assert record["errors"] == {}


# --- MonoMoE ---------------------------------------------------------------------------------------------


def test_monomoe_gets_rows_of_gate_and_up_by_eights() -> None:
    """The order of its documentation, row by row: by blocks of 64, two warpgroups of 32 and four warps of 8."""
    rows = torch.arange(2 * 128, dtype=torch.uint8)[None, :, None].expand(2, 256, 4).contiguous()
    got = monomoe.in_eights(rows.view(torch.float8_e4m3fn)).view(torch.uint8)[1, :, 3].tolist()
    for block, warpgroup, warp, row in itertools.product(range(2), range(2), range(4), range(8)):
        at, gate = 128 * block + 64 * warpgroup + 16 * warp + row, 64 * block + 32 * warpgroup + 8 * warp + row
        assert got[at] == gate
        assert got[at + 8] == 128 + gate


def test_monomoe_takes_its_shape_alone(tmp_path: Path) -> None:
    peer = monomoe.MonoMoe(tmp_path)
    other = LayerPoint("other", 1, 256, 8, 2048, 768)
    many = LayerPoint("many", 9, 256, 8, 2048, 512)
    assert all(peer.layer(types.SimpleNamespace(point=point)) == [] for point in (other, many))  # type: ignore[arg-type]
    assert "build.sh" in peer.missing() or "CUDA GPU" in peer.missing()


def test_monomoe_is_handed_a_layers_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EXPERTS", 6), ("TOP_K", 2), ("HIDDEN", 256), ("INTERMEDIATE", 128)):
        monkeypatch.setattr(monomoe, name, value)
    layer = make_layer(LayerPoint("tiny", 3, 6, 2, 256, 128), 1, "cpu")
    seen: list[tuple[int, ...]] = []
    results = [0, 719]
    peer = monomoe.MonoMoe(None)
    peer._library = types.SimpleNamespace(
        monomoe_scratch_bytes=lambda: 64, monomoe_layer=lambda *given: seen.append(given) or results.pop(0)
    )
    (contender,) = peer.layer(layer)
    contender.call()
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        contender.call()
    x, tokens, logits, _, scale13, w2, scale2, out, _, top_k, _ = seen[0]
    assert contender.buffer is not None
    tensors = (layer.x, layer.logits, layer.w13.scale, layer.w2.data, layer.w2.scale, contender.buffer)
    assert [x, logits, scale13, w2, scale2, out] == [t.data_ptr() for t in tensors]
    assert (tokens, top_k) == (3, 2)
    assert all(t.is_contiguous() for t in tensors)
    assert layer.logits.dtype == torch.bfloat16


def test_every_peer_names_its_licence_where_it_is_described() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    described = dict(re.findall(r"^\| `(\w+)` \| ([\w.-]+) \|", text.partition("## Peers")[2], re.MULTILINE))
    assert described == {peer.name: peer.licence for peer in find.every_peer(None)}
