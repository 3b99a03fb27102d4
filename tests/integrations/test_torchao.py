"""States of models under `PadlessTrainingOpConfig`: saved, and loaded by torch.load and by distributed checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao on PYTHONPATH")
ROOT = Path(__file__).parents[2]


class Experts(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(4, 128, 256, generator=generator).bfloat16() / 16)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=offs)


def converted(seed: int, recipe: str = "fp8_1d1d") -> Any:
    from torchao.quantization import quantize_

    from padless.integrations.torchao import PadlessTrainingOpConfig

    module = Experts(seed)
    quantize_(module, PadlessTrainingOpConfig(recipe), filter_fn=lambda module, name: True)
    return module


def output(module: Any) -> torch.Tensor:
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    return module(x, torch.tensor([0, 7, 30, 50], dtype=torch.int32))


def trained(module: Any) -> Any:
    """An optimizer with the states of one step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    output(module).float().square().mean().backward()
    optimizer.step()
    return optimizer


def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    from padless.integrations.torchao import PadlessWeight

    saved, other = converted(0), converted(1)
    optimizer = trained(saved)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(state["model"]["w"]) is PadlessWeight
    assert state["model"]["w"].config.recipe == "fp8_1d1d"
    assert not torch.equal(output(other), output(saved))
    other.load_state_dict(state["model"])
    assert torch.equal(output(other), output(saved))
    again = trained(other)
    again.load_state_dict(state["optimizer"])
    found, want = again.state_dict()["state"][0], optimizer.state_dict()["state"][0]
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved, other = converted(0), converted(1)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    assert torch.equal(output(other), output(saved))


PROGRAM = """
import torch
{imports}
state = torch.load({path!r})
print(type(state["w"]).__name__, state["w"].config.recipe, state["w"]._data.float().sum().item())
"""


def in_another_process(path: Path, imports: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports, path=str(path))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])},
    )


def test_another_process_loads_it_with_the_module_imported(tmp_path: Path) -> None:
    module = converted(0)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    done = in_another_process(tmp_path / "state.pt", "import padless.integrations.torchao")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["PadlessWeight", "fp8_1d1d", str(module.w.data._data.float().sum().item())]


def test_without_it_torch_names_the_class_that_is_not_known(tmp_path: Path) -> None:
    """docs/frameworks.md says which import is missing then."""
    torch.save(converted(0).state_dict(), tmp_path / "state.pt")
    done = in_another_process(tmp_path / "state.pt", "")
    assert done.returncode == 1
    assert "Unsupported global: GLOBAL padless.integrations.torchao.PadlessWeight" in done.stderr
    assert "import padless.integrations.torchao" in (ROOT / "docs/frameworks.md").read_text()
