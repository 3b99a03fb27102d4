"""Adapters under PEFT's names: shapes and order by PEFT's definition of a delta, there and back, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padless import MXFP4, quantize
from padless.nn.lora import LoraExperts, from_peft, merged, to_peft

PREFIX = "base_model.model.model.layers.3.mlp.experts"
E, H, INNER, R = 3, 64, 32, 5


def module(seed: int, names: tuple[str, ...] = ("one", "two")) -> LoraExperts:
    g = torch.Generator().manual_seed(seed)
    w13, w2 = (quantize(torch.randn(s, generator=g), MXFP4, kind="weight") for s in ((E, 2 * INNER, H), (E, H, INNER)))
    m = LoraExperts(w13, w2, rank=R, adapters=names, dtype=torch.float32)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return m


def test_names_and_order() -> None:
    """delta_e[n, k] = sum over j of B[n, j E + e] A[e r + j, k]: written with the file's indices, element by element."""
    m = module(0)
    found = to_peft(m, "two", PREFIX)
    shapes = {name.removeprefix(PREFIX + "."): tuple(t.shape) for name, t in found.items()}
    assert shapes == {
        "base_layer.lora_A.weight": (E * R, H),
        "base_layer.lora_B.weight": (2 * INNER, R * E),
        "lora_A.weight": (E * R, INNER),
        "lora_B.weight": (H, R * E),
    }
    for middle, a_of, b_of in (("base_layer.", m.a13, m.b13), ("", m.a2, m.b2)):
        a, b = (found[f"{PREFIX}.{middle}lora_{side}.weight"].double() for side in "AB")
        for e in range(E):
            delta = sum(torch.outer(b[:, j * E + e], a[e * R + j]) for j in range(R))
            torch.testing.assert_close(delta, b_of["two"][e].double() @ a_of["two"][e].double(), rtol=1e-12, atol=1e-12)


def test_there_and_back() -> None:
    """Into another adapter of another module: its parameters alone change, and the file's tensors are its own."""
    m, other = module(0), module(1)
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    found = to_peft(m, "one", PREFIX)
    from_peft(other, "two", PREFIX, found)
    for place in ("a13", "b13", "a2", "b2"):
        assert torch.equal(getattr(other, place)["two"], getattr(m, place)["one"])
        assert torch.equal(getattr(other, place)["one"], before[f"{place}.one"])
    kept = m.a13["one"].detach().clone()
    for t in found.values():
        t.zero_()
    assert torch.equal(m.a13["one"], kept)


def test_refusals_write_nothing() -> None:
    m = module(0)
    found = to_peft(module(1), "one", PREFIX)
    before = {n: p.detach().clone() for n, p in m.named_parameters()}
    last = f"{PREFIX}.lora_B.weight"
    for wrong in ({**found, last: found[last].T}, {n: t for n, t in found.items() if n != last}):
        with pytest.raises(ValueError, match="lora_B"):
            from_peft(m, "one", PREFIX, wrong)
    assert all(torch.equal(p, before[n]) for n, p in m.named_parameters())
    with pytest.raises(ValueError, match="three"):
        to_peft(m, "three", PREFIX)


def test_adapters_of_which_ranks_have_parts_are_refused(tmp_path: Path) -> None:
    """Gathered they are written, with what was trained."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    m, plain = module(0), module(0)
    found = to_peft(plain, "one", PREFIX)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = fully_shard(m, mesh=init_device_mesh("cpu", (1,)))
        for call in (
            lambda: to_peft(m, "one", PREFIX),
            lambda: from_peft(m, "one", PREFIX, found),
            lambda: merged(m, "one"),
        ):
            with pytest.raises(ValueError, match=r"adapter 'one' has DTensors"):
                call()
        sharded.unshard()
        gathered = to_peft(m, "one", PREFIX)
        assert torch.equal(merged(m, "one").loss2, merged(plain, "one").loss2)
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(gathered[name], t) for name, t in found.items())
