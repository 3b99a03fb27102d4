"""torchtitan's grouped experts with padless' products: values, gradients, the override by name, and torchao's wrappers.

Where torchtitan (and torchao) can be imported their own files are used; elsewhere torchtitan is
`support.torchtitan_seam`, and torchao's tests are skipped.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, dequantize, quantize
from padless.moe import moe
from support import torchtitan_seam

HAS_TITAN = find_spec("torchtitan") is not None
needs_titan = pytest.mark.skipif(not HAS_TITAN, reason="needs torchtitan's Python files on PYTHONPATH")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao on PYTHONPATH")
TARGET = "padless.integrations.torchtitan.fp8_experts"
COUNTS = [0, 1, 127, 129, 40]


@pytest.fixture(scope="module", autouse=True)
def _seam() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TITAN:
            torchtitan_seam.install(patch)
        yield
        if not HAS_TITAN:
            sys.modules.pop("padless.integrations.torchtitan", None)


def plugin() -> Any:
    return importlib.import_module("padless.integrations.torchtitan")


def config_of(**more: Any) -> Any:
    experts = importlib.import_module("torchtitan.models.common.moe").GroupedExperts
    return experts.Config(dim=256, hidden_dim=128, num_experts=len(COUNTS), **more)


def filled(module: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module


def rows(tail: int = 0) -> torch.Tensor:
    x = torch.randn(sum(COUNTS) + tail, 256, generator=torch.Generator().manual_seed(4))
    x[sum(COUNTS) :] = torch.nan
    return x


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def trained(module: Any, x: torch.Tensor) -> SimpleNamespace:
    """Output and gradients of one step with a random gradient."""
    x = x.clone().requires_grad_()
    out = module(x, torch.tensor(COUNTS))
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    out.backward(upstream)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return SimpleNamespace(out=out.detach(), dx=x.grad, gradients=gradients)


# --- values ----------------------------------------------------------------------------------------------


def test_a_step_against_bfloat16() -> None:
    """Output and all gradients near those of torch's bfloat16 products, by expert; FP8 is what makes the difference."""
    new = plugin().fp8_experts(config_of())
    got, want = trained(filled(new.build()), rows()), trained(filled(config_of().build()), rows())
    assert 0.02 < error(got.out, want.out) < 0.08
    assert error(got.dx, want.dx) < 0.09
    assert set(got.gradients) == set(want.gradients)
    for name, gradient in got.gradients.items():
        assert gradient.dtype == torch.float32
        assert error(gradient, want.gradients[name]) < 0.09, name
        for expert, count in enumerate(COUNTS):
            if count == 0:
                assert not gradient[expert].any()
            else:
                assert error(gradient[expert], want.gradients[name][expert]) < 0.12, (name, expert)


def test_the_products_are_128_block_fp8() -> None:
    """The first product equals that of operands rounded to FP8 in blocks, in float64, but for bfloat16's rounding."""
    module = filled(plugin().fp8_experts(config_of()).build())
    x = rows().bfloat16()
    offs = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    w = module.w1_EFD.detach().bfloat16()
    got = module._grouped_mm(A=x, B_t=w.transpose(-2, -1), offs=offs)
    a = dequantize(quantize(x, FP8_BLOCK), torch.float32).double()
    b = dequantize(quantize(w, FP8_BLOCK, kind="weight"), torch.float32).double()
    want = torch.cat([part @ b[e].T for e, part in enumerate(a.split(COUNTS))])
    assert error(got, want) < 0.003
    plain = torch.cat([part @ w[e].double().T for e, part in enumerate(x.double().split(COUNTS))])
    assert error(got, plain) > 0.02


def test_rows_behind_the_last_group_do_no_harm() -> None:
    """torchtitan's dispatchers leave rows past the counts; NaN there reaches neither outputs nor gradients."""
    module = filled(plugin().fp8_experts(config_of()).build())
    want = trained(module, rows())
    for parameter in module.parameters():
        parameter.grad = None
    x = rows(tail=9)
    offs = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    y = module._grouped_mm(A=x.bfloat16(), B_t=module.w1_EFD.bfloat16().transpose(-2, -1), offs=offs)
    assert not y[sum(COUNTS) :].any()
    got = module(torch.nan_to_num(x), torch.tensor(COUNTS))
    assert torch.equal(got[: sum(COUNTS)].detach(), want.out)


def test_rows_have_the_bits_of_moe() -> None:
    """What the module gives a row is what `padless.moe.moe` gives a token with this row's expert alone."""
    module = filled(plugin().fp8_experts(config_of()).build())
    x = rows().bfloat16()
    w13 = torch.cat((module.w1_EFD, module.w3_EFD), dim=1).detach().bfloat16()
    codes = [quantize(w, FP8_BLOCK, kind="weight") for w in (w13, module.w2_EDF.detach().bfloat16())]
    ids = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))[:, None]
    want = moe(x, ids, torch.ones(ids.shape), *codes)
    assert torch.equal(module(x, torch.tensor(COUNTS)), want)


def test_experts_with_a_forward_of_their_own_keep_it() -> None:
    """Products alone are replaced there: rows of the first product are quantized twice, gate and up rounded apart."""
    base = type(config_of())._owner

    class Own(base):  # type: ignore[misc, valid-type]
        def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x_RD, num_tokens_per_expert_E)

    made = plugin().padless_experts(Own)
    assert made.forward is Own.forward
    assert plugin().padless_experts(base).forward is not base.forward


def test_recipes_by_name() -> None:
    build = plugin().fp8_experts
    steps = {}
    for recipe in ("bf16", "fp8", "fp8_bf16_wgrad"):
        new = build(config_of(), recipe=recipe)
        assert new.recipe == recipe
        steps[recipe] = trained(filled(new.build()), rows())
    want = trained(filled(config_of().build()), rows())
    assert error(steps["bf16"].out, want.out) < 0.005
    assert torch.equal(steps["fp8_bf16_wgrad"].out, steps["fp8"].out)
    exact, rounded = steps["fp8_bf16_wgrad"].gradients, steps["fp8"].gradients
    assert all(not torch.equal(exact[name], rounded[name]) for name in exact)
    with pytest.raises(ValueError, match="recipe is 'fp4'"):
        build(config_of(), recipe="fp4")


@pytest.mark.slow
def test_compiled() -> None:
    """Forward and backward in one graph, with the bits of eager calls."""
    module = filled(plugin().fp8_experts(config_of()).build())
    want = trained(module, rows())
    module.zero_grad()
    got = trained(torch.compile(module, fullgraph=True, backend="aot_eager"), rows())
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.dx, want.dx)
    for name, gradient in want.gradients.items():
        assert torch.equal(got.gradients[f"_orig_mod.{name}"], gradient), name


# --- the seam --------------------------------------------------------------------------------------------


def test_the_class_is_made_once_and_of_any_experts() -> None:
    made = plugin().padless_experts
    base = type(config_of())._owner
    assert made(base) is made(base)
    assert list(inspect.signature(made(base)._grouped_mm).parameters) == torchtitan_seam.GROUPED_MM
    assert list(inspect.signature(base._grouped_mm).parameters) == torchtitan_seam.GROUPED_MM
    with pytest.raises(ValueError, match="base is Linear, which has no method _grouped_mm"):
        made(torch.nn.Linear)


@pytest.mark.skipif(HAS_TITAN, reason="torchtitan is there")
def test_the_override_is_registered_by_its_import_path() -> None:
    plugin()
    target, factory = torchtitan_seam.REGISTERED[TARGET]
    assert target is torchtitan_seam.GroupedExperts.Config
    assert factory is plugin().fp8_experts


@needs_titan
def test_torchtitan_applies_the_override_by_name() -> None:
    """apply_overrides over a tree of torchtitan's own: found by name, keywords passed on, gpt-oss' experts too."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    sizes = {"dim": 256, "hidden_dim": 128, "num_experts": 5}
    dispatcher = LocalTokenDispatcher.Config(num_experts=5, top_k=2)
    tree = RoutedExperts.Config(inner_experts=config_of(), token_dispatcher=dispatcher)
    lines = apply_overrides(OverrideConfig(imports=[(TARGET, {"recipe": "fp8_1d1d"})]), tree)
    assert len(lines) == 1
    assert tree.inner_experts.recipe == "fp8_1d1d"

    plain = RoutedExperts.Config(inner_experts=config_of(), token_dispatcher=dispatcher)
    x = torch.randn(2, 21, 256, generator=torch.Generator().manual_seed(6))
    scores = torch.rand(2, 21, 5, generator=torch.Generator().manual_seed(7))
    top, ids = scores.topk(2, dim=-1)
    results = []
    for module in (filled(tree.build()), filled(plain.build())):
        out = module(x, top, ids, torch.bincount(ids.flatten(), minlength=5))
        out.square().sum().backward()
        results.append((out, module.inner_experts.w2_EDF.grad))
    assert 0.02 < error(results[0][0], results[1][0]) < 0.08
    assert 0.02 < error(results[0][1], results[1][1]) < 0.12

    tree = RoutedExperts.Config(inner_experts=GptOssGroupedExperts.Config(**sizes), token_dispatcher=dispatcher)
    apply_overrides(OverrideConfig(imports=[TARGET]), tree)
    module, base = filled(tree.inner_experts.build()), filled(GptOssGroupedExperts.Config(**sizes).build())
    assert isinstance(module, GptOssGroupedExperts)
    got, want = trained(module, rows()), trained(base, rows())
    assert 0.01 < error(got.out, want.out) < 0.08
    assert error(got.gradients["mlp1_weight_EGD"], want.gradients["mlp1_weight_EGD"]) < 0.12


# --- torchao ---------------------------------------------------------------------------------------------


def of_products() -> Any:
    """torchtitan's own forward over padless' products, which is what a wrapper of parameters can give."""
    base = type(config_of())._owner
    own = type("Own", (base,), {"forward": lambda self, *operands: base.forward(self, *operands)})
    made = plugin().padless_experts(own)
    return filled(made(made.Config(dim=256, hidden_dim=128, num_experts=len(COUNTS))))


def converted(recipe: str = "fp8") -> Any:
    from torchao.quantization import quantize_

    from padless.integrations.torchao import PadlessTrainingOpConfig

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), filled(config_of().build()))
    quantize_(model, PadlessTrainingOpConfig(recipe), filter_fn=lambda module, name: name == "1")
    return model


@needs_torchao
def test_torchao_wraps_the_experts_and_nothing_else() -> None:
    from padless.integrations.torchao import PadlessWeight

    model = converted()
    kinds = {name: type(p.data) for name, p in model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind is PadlessWeight} == {
        f"1.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")
    }
    got = trained(model[1], rows())
    same = trained(of_products(), rows())
    assert torch.equal(got.out, same.out)
    assert torch.equal(got.dx, same.dx)
    for name, gradient in got.gradients.items():
        assert torch.equal(gradient, same.gradients[name]), name


@needs_torchao
def test_torchao_s_wrapper_trains_as_products_of_the_override() -> None:
    """Three steps of AdamW, bit for bit; the state dict holds the values."""
    modules = (converted()[1], of_products())
    for module in modules:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            trained(module, rows())
            optimizer.step()
    wrapped, plain = (module.state_dict() for module in modules)
    for name, values in plain.items():
        assert torch.equal(wrapped[name]._data, values), name


@needs_torchao
def test_torchao_refusals() -> None:
    from padless.integrations.torchao import PadlessTrainingOpConfig

    with pytest.raises(ValueError, match="recipe is 'fp4'"):
        PadlessTrainingOpConfig("fp4")
    weight = converted()[1].w1_EFD
    with pytest.raises(ValueError, match="other operands than rows"):
        torch._grouped_mm(torch.randn(5, 4, 256), weight.transpose(-2, -1))
    plain = weight + 0  # any other operation sees the values
    assert type(plain) is torch.Tensor
