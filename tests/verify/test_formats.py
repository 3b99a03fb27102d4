"""The problems that ``padless verify`` compares: every pair and kernel is drawn, alike everywhere, and is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.formats import BlockScaledTensor
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import ROUTES
from padless.ops.grouped_gemm import grouped_gemm
from padless.verify import formats as verify_formats
from padless.verify.formats import CHECK, configs_of, random_formats_problem, routes_of


def test_every_grouped_route_but_the_first_kernels_is_verified() -> None:
    listed = {p for p in ROUTES if p.operation == "grouped_gemm" and p.config_class is not Sm90Fp8Config}
    assert {p for arch in ("sm_90a", "sm_100a") for p in routes_of(arch)} == listed
    assert routes_of("sm_103a") == routes_of("sm_100a")


def test_the_draws_reach_all_configurations_layouts_and_output_types() -> None:
    route = next(p for p in routes_of("sm_90a") if (p.config_class, p.a, p.b) == (Sm90Bf16Config, "NVFP4", "NVFP4"))
    problems = [random_formats_problem(route, seed) for seed in range(150)]
    assert {p.config for p in problems} == set(configs_of(route))
    assert {p.dtype for p in problems} == set(verify_formats.DTYPES)
    a_layouts = {p.a.scale_layout for p in problems if isinstance(p.a, BlockScaledTensor)}
    assert a_layouts == {"plain", "blocked", "blocked_groups"}
    assert {p.b.scale_layout for p in problems} == {"plain", "blocked"}
    assert any(int(p.offs[-1]) < p.a.shape[0] for p in problems), "rows past the last group"
    again = random_formats_problem(route, 7)
    assert torch.equal(again.b.data.view(torch.uint8), problems[7].b.data.view(torch.uint8))


def mistaken(mistake: str | None) -> Callable[..., torch.Tensor]:
    """The reference's product, with a mistake."""

    def call(a: Any, b: Any, offs: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
        grouped_gemm(a, b, offs, out=out, backend="reference")
        valid = int(offs[-1])
        if mistake == "row" and valid > 0:
            out[valid // 2] = 0
        if mistake == "element" and valid > 0:
            out[valid // 2, 0] *= 1.5
        if mistake == "past" and valid < out.shape[0]:
            out[valid] = 0
        return out

    return call


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("row", r"MXFP4 x MXFP4, problem .: rows"),
        ("element", r"MXFP4 x MXFP4, problem .(;|$)"),
        ("past", "written outside of the valid rows"),
    ],
)
def test_the_check_sees_a_wrong_row_a_wrong_element_and_a_write_past_the_groups(
    mistake: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole check on the CPU, the reference in the GPU's place: right, then with a planted mistake."""
    route = next(p for p in routes_of("sm_90a") if (p.config_class, p.a, p.b) == (Sm90Bf16Config, "MXFP4", "MXFP4"))
    monkeypatch.setattr(verify_formats, "routes_of", lambda arch: [route])
    monkeypatch.setattr(verify_formats, "grouped_gemm", mistaken(None))
    assert "worst row" in CHECK.on("reference", "sm_90a")
    monkeypatch.setattr(verify_formats, "grouped_gemm", mistaken(mistake))
    with pytest.raises(AssertionError, match=said):
        CHECK.on("reference", "sm_90a")
