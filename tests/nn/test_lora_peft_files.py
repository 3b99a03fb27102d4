"""Adapters as folders of PEFT: what is written, by the documented format and by PEFT itself, there and back, refusals.

A sceptic wants to see that PEFT, given the file, computes W + delta of the adapter that was saved, and the other way
round; that a file of every kind that would be computed wrongly is refused; and that a refused file writes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from padless import MXFP4, dequantize, quantize
from padless.moe import Activation
from padless.nn.lora import LoraExperts, load_adapter, save_adapter

safetensors = pytest.importorskip("safetensors.torch")

NAMES = ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
E, H, INNER, R = 3, 64, 32, 5


def module(seed: int, gate_up: str = "concatenated", **keywords: Any) -> LoraExperts:
    g = torch.Generator().manual_seed(seed)
    w13, w2 = (quantize(torch.randn(s, generator=g), MXFP4, kind="weight") for s in ((E, 2 * INNER, H), (E, H, INNER)))
    settings = {"rank": R, "alpha": 7.0, "adapters": ("one", "two"), "dtype": torch.float32} | keywords
    m = LoraExperts(w13, w2, activation=Activation(gate_up=gate_up), **settings)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return m


def model(seed: int, **keywords: Any) -> dict[str, LoraExperts]:
    return {name: module(seed + i, **keywords) for i, name in enumerate(NAMES)}


def values(modules: dict[str, LoraExperts]) -> list[torch.Tensor]:
    return [p.detach().clone() for m in modules.values() for p in m.parameters()]


def test_what_is_written(tmp_path: Path) -> None:
    """Names and shapes are those that PEFT 0.21.2 wrote for two modules of parameters (E, 2 I, H) and (E, H, I)."""
    save_adapter(tmp_path / "new" / "folder", model(0, dropout=0.1), "two", base_model="some/model")
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    shapes = {n: tuple(t.shape) for n, t in safetensors.load_file(folder / "adapter_model.safetensors").items()}
    assert shapes == {
        f"base_model.model.model.layers.{layer}.mlp.experts.{end}.weight": shape
        for layer in (0, 2)
        for end, shape in (
            ("base_layer.lora_A", (15, 64)),
            ("base_layer.lora_B", (64, 15)),
            ("lora_A", (15, 32)),
            ("lora_B", (64, 15)),
        )
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] == 5
    assert config["lora_alpha"] == 7.0
    assert config["use_rslora"] is False
    assert config["base_model_name_or_path"] == "some/model"
    assert config["target_modules"] == []
    assert config["lora_dropout"] == 0.0  # PEFT refuses another for parameters
    assert config["target_parameters"] == [f"{name}.{p}" for name in NAMES for p in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize("rslora", [False, True])
def test_there_and_back(tmp_path: Path, rslora: bool) -> None:
    saved, other = model(0, rslora=rslora), model(10, rslora=rslora)
    kept = [m.a13["one"].detach().clone() for m in other.values()]
    save_adapter(tmp_path, saved, "one")
    assert load_adapter(tmp_path, other, "two") == ()
    for m, n, k in zip(saved.values(), other.values(), kept, strict=True):
        for place in ("a13", "b13", "a2", "b2"):
            assert torch.equal(getattr(m, place)["one"], getattr(n, place)["two"])
        assert torch.equal(n.a13["one"], k)
    left = load_adapter(tmp_path, {NAMES[0]: other[NAMES[0]]}, "one")  # the file has more than the model adapts
    assert len(left) == 4
    assert all("layers.2." in name for name in left)


@pytest.mark.parametrize("gate_up", ["concatenated", "alternating"])
def test_linear_layers_of_experts(tmp_path: Path, gate_up: str) -> None:
    """Rows of gate and up are taken by hand from B A of the whole projection, for each expert."""
    m = module(3, gate_up)
    save_adapter(tmp_path, {NAMES[0]: m}, "one", layout="modules")
    found = {n: t.double() for n, t in safetensors.load_file(tmp_path / "adapter_model.safetensors").items()}
    assert len(found) == E * 6
    delta13, delta2 = (
        b["one"].detach().double() @ a["one"].detach().double() for a, b in ((m.a13, m.b13), (m.a2, m.b2))
    )
    rows = torch.arange(2 * INNER)
    gate = rows < INNER if gate_up == "concatenated" else rows % 2 == 0
    for e in range(E):
        for name, wanted in (("gate_proj", delta13[e, gate]), ("up_proj", delta13[e, ~gate]), ("down_proj", delta2[e])):
            a, b = (found[f"base_model.model.{NAMES[0]}.{e}.{name}.lora_{side}.weight"] for side in "AB")
            assert a.shape[0] == R
            torch.testing.assert_close(b @ a, wanted, rtol=1e-12, atol=1e-12)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["gate_proj", "up_proj", "down_proj"]
    assert "target_parameters" not in config
    with pytest.raises(ValueError, match="nothing under"):
        load_adapter(tmp_path, {NAMES[0]: m}, "one")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 4}, "rank 4"),
        ({"lora_alpha": 8}, "scaling"),
        ({"use_rslora": True}, "scaling"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"gate_up_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"gate_up_proj": 8}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "no LoRA"),
        ({"r": None}, "must be numbers"),
    ],
)
def test_refused_settings(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_adapter(tmp_path, model(0), "one")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    other = model(10)
    before = values(other)
    with pytest.raises(ValueError, match=message):
        load_adapter(tmp_path, other, "one")
    assert all(torch.equal(a, b) for a, b in zip(before, values(other), strict=True))


def test_refused_files_write_nothing(tmp_path: Path) -> None:
    """The fault is in the last layer: the first one must not have been written by then."""
    other = model(10)
    before = values(other)
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        load_adapter(tmp_path, other, "one")
    save_adapter(tmp_path, model(0), "one")
    path = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    last = f"base_model.model.{NAMES[1]}.lora_B.weight"
    for wrong in ({n: t for n, t in tensors.items() if n != last}, tensors | {last: tensors[last].T.contiguous()}):
        safetensors.save_file(wrong, path)
        with pytest.raises(ValueError, match="lora_B"):
            load_adapter(tmp_path, other, "one")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load_adapter(tmp_path, other, "one")
    assert all(torch.equal(a, b) for a, b in zip(before, values(other), strict=True))


def test_refused_calls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout"):
        save_adapter(tmp_path, model(0), "one", layout="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        save_adapter(tmp_path, {}, "one")
    with pytest.raises(ValueError, match="three"):
        save_adapter(tmp_path, model(0), "three")
    with pytest.raises(ValueError, match="differ"):
        save_adapter(tmp_path, {"a": module(0), "b": module(1, alpha=8.0)}, "one")
    assert not any(tmp_path.iterdir())


class Weights(nn.Module):
    """Experts as transformers has them: two parameters, (E, 2 I, H) and (E, H, I)."""

    def __init__(self, m: LoraExperts) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(dequantize(m.w13)), nn.Parameter(dequantize(m.w2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_up_proj * x, self.down_proj * x


def tree(modules: dict[str, LoraExperts]) -> nn.Module:
    """A model with `Weights` under the names of `modules`."""
    root = nn.Module()
    for name, m in modules.items():
        parent = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, Weights(m))
    return root


def deltas(adapted: nn.Module, modules: dict[str, LoraExperts]) -> list[torch.Tensor]:
    """W + delta - W, as PEFT computes it."""
    found = []
    for name, m in modules.items():
        w13, w2 = adapted.get_submodule(f"base_model.model.{name}")(torch.ones(()))
        found += [w13.detach() - dequantize(m.w13), w2.detach() - dequantize(m.w2)]
    return found


def own(modules: dict[str, LoraExperts], adapter: str) -> list[torch.Tensor]:
    return [
        m.scaling * (b[adapter].detach() @ a[adapter].detach())
        for m in modules.values()
        for a, b in ((m.a13, m.b13), (m.a2, m.b2))
    ]


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_it(tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    modules = model(0, rslora=rslora, dropout=0.1)
    save_adapter(tmp_path, modules, "two")
    adapted = peft.PeftModel.from_pretrained(tree(modules), str(tmp_path))
    for got, wanted in zip(deltas(adapted, modules), own(modules, "two"), strict=True):
        assert wanted.abs().max() > 1.0
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [1, -1])
def test_peft_writes_it(tmp_path: Path, order: int) -> None:
    """Whatever the order of the targets: PEFT nests by the order of the module's parameters."""
    peft = pytest.importorskip("peft")
    modules = model(0)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"][::order]
    config = peft.LoraConfig(r=R, lora_alpha=7.0, target_modules=[], target_parameters=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(tree(modules), config)
    adapted.save_pretrained(str(tmp_path))
    assert load_adapter(tmp_path, modules, "one") == ()
    for got, wanted in zip(deltas(adapted, modules), own(modules, "one"), strict=True):
        assert wanted.abs().max() > 0.1
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
