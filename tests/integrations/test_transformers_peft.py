"""PEFT's adapters over quantized experts, against `adapt_experts` with the same adapter, to the bit.

`adapt_experts` is checked against W + B A elsewhere. A sceptic wants to see that PEFT's own calls (get_peft_model, a
second adapter, save and load) end in the same logits; that without an adapter the model has the bits it had; that A
and B have logical sizes and gradients; that merging is refused; and that modules without codes are still PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from padless import MXFP4, NVFP4
from padless.integrations.transformers import adapt_experts, quantize_experts, use_padless_peft
from padless.nn.lora import LoraExperts, load_adapter
from support.hub_checkpoints import error, load, logits, tokens

peft = pytest.importorskip("peft")

KINDS = [("qwen3_moe", "bf16", MXFP4), ("qwen3_moe", "bf16", NVFP4), ("qwen3_moe", "fp8", None)]
KINDS += [("gpt_oss", "mxfp4", None)]
PARAMETERS = pytest.mark.parametrize(("name", "kind", "format"), KINDS)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: other tests see PEFT as it is."""
    from peft.tuners.lora.model import LoraModel

    monkeypatch.setattr(LoraModel, "_create_new_module", staticmethod(LoraModel._create_new_module))
    use_padless_peft()
    use_padless_peft()


def quantized(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> Any:
    model = load(folder_of(name, kind), experts_implementation="padless")
    return model if format is None else quantize_experts(model, format)


def config(kind: str, *sides: str, **options: Any) -> Any:
    end = "_blocks" if kind == "mxfp4" else ""
    targets = [f"mlp.experts.{side}{end}" for side in sides or ("gate_up_proj", "down_proj")]
    settings = {"r": 4, "lora_alpha": 8.0, "target_modules": [], "target_parameters": targets}
    return peft.LoraConfig(**(settings | options))


def randomized(model: Any, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if ".lora_" in n:
                p.copy_(torch.randn(p.shape, generator=g) * 0.05)
    return model


def ours(folder: Path, name: str, kind: str, format: Any, folder_of: Any) -> tuple[Any, dict[str, LoraExperts]]:
    """A model with padless' own adapters, read from the folder that PEFT wrote."""
    model = quantized(name, kind, format, folder_of)
    lora = adapt_experts(model, rank=4, alpha=8.0, dtype=torch.float32)
    assert load_adapter(folder, lora, "default") == ()
    return model, lora


@PARAMETERS
def test_logits_and_gradients(
    name: str, kind: str, format: Any, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = quantized(name, kind, format, folder_of)
    before = logits(base)
    model = randomized(peft.get_peft_model(base, config(kind)))
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if ".lora_A" in n}
    experts = 8 if name == "qwen3_moe" else 4
    assert {rows for rows, _ in shapes} == {4 * experts}
    assert {columns for _, columns in shapes} == {256, 384 if name == "qwen3_moe" else 96}
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if ".lora_" in n)
    model.save_pretrained(str(tmp_path))
    other, lora = ours(tmp_path, name, kind, format, folder_of)
    got = logits(model)
    assert torch.equal(got, logits(other))
    assert not torch.equal(got, before)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)

    for p in other.parameters():
        p.requires_grad_(False)
    for m in lora.values():
        m.requires_grad_(True)
    for each in (model, other):
        each.train()(tokens(), labels=tokens()).loss.backward()
    for m, layer in zip(lora.values(), model.base_model.model.model.layers, strict=True):
        inner, outer = layer.mlp.experts.base_layer, layer.mlp.experts
        for wrapper, a, b in ((inner, m.a13, m.b13), (outer, m.a2, m.b2)):
            da, db = (wrapper.lora_A["default"].weight.grad, wrapper.lora_B["default"].weight.grad)
            count, rank = m.num_experts, m.rank
            assert bool(da.any())
            assert bool(db.any())
            torch.testing.assert_close(da.reshape(count, rank, -1), a["default"].grad, rtol=0, atol=0)
            torch.testing.assert_close(db.reshape(-1, rank, count).permute(2, 0, 1), b["default"].grad, rtol=0, atol=0)


def test_several_adapters(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """Chosen, saved, loaded; two active ones are added."""
    case = ("qwen3_moe", "bf16", MXFP4)
    model = peft.get_peft_model(quantized(*case, folder_of), config("bf16"), adapter_name="one")
    model.add_adapter("two", config("bf16"))
    randomized(model)
    found = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        found[name] = logits(model)
    assert not torch.equal(found["one"], found["two"])
    model.save_pretrained(str(tmp_path))
    again = peft.PeftModel.from_pretrained(quantized(*case, folder_of), str(tmp_path / "one"), adapter_name="one")
    assert torch.equal(logits(again), found["one"])
    again.load_adapter(str(tmp_path / "two"), adapter_name="two")
    again.set_adapter("two")
    assert torch.equal(logits(again), found["two"])
    # Twice the same adapter is one of twice the scaling.
    with torch.no_grad():
        values = {n: p for n, p in model.named_parameters() if ".lora_" in n}
        for n, p in values.items():
            if ".one." in n:
                values[n.replace(".one.", ".two.")].copy_(p)
    model.base_model.set_adapter(["one", "two"])
    both = logits(model)
    model.set_adapter("one")
    for wrapper in model.modules():
        if getattr(wrapper, "scaling", None) and hasattr(wrapper, "side"):
            wrapper.scaling["one"] *= 2
    twice = logits(model)
    assert error(both, twice) < 0.01
    assert error(both, found["one"]) > 0.1, "the second one is seen"


def test_one_projection(folder_of: Callable[..., Path]) -> None:
    """An adapter of the other projection that is zero changes no bit, so it is the same as none."""
    for kept, zeroed in (("down_proj", "gate_up_proj"), ("gate_up_proj", "down_proj")):
        alone = peft.get_peft_model(quantized("qwen3_moe", "fp8", None, folder_of), config("fp8", kept))
        both = peft.get_peft_model(quantized("qwen3_moe", "fp8", None, folder_of), config("fp8"))
        randomized(alone)
        values = [[w for w in model.modules() if getattr(w, "side", None) == kept] for model in (alone, both)]
        for one, other in zip(*values, strict=True):
            other.lora_A.load_state_dict(one.lora_A.state_dict())
            other.lora_B.load_state_dict(one.lora_B.state_dict())
        assert any(getattr(w, "side", None) == zeroed for w in both.modules())
        assert torch.equal(logits(alone), logits(both))


def test_refusals(folder_of: Callable[..., Path]) -> None:
    model = peft.get_peft_model(quantized("qwen3_moe", "fp8", None, folder_of), config("fp8"))
    for call in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="quantizing again"):
            call()
    with pytest.raises(ValueError, match="not a weight"):
        peft.get_peft_model(quantized("qwen3_moe", "fp8", None, folder_of), config("fp8", "down_proj_scale_inv"))
    model.add_adapter("large", config("fp8", r=253))
    model.base_model.set_adapter(["default", "large"])
    with pytest.raises(ValueError, match="rank of 257 together; at most 256"):
        logits(model)


def test_other_modules_are_left_to_peft(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("qwen3_moe", "bf16"))
    found = peft.get_peft_model(model, config("bf16", target_modules=["q_proj"]))
    wrappers = [m for m in found.modules() if type(m).__name__ == "ParamWrapper"]
    assert wrappers
    assert {type(m).__module__ for m in wrappers} == {"peft.tuners.lora.layer"}
