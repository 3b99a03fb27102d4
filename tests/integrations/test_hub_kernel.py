"""The kernel for the Hugging Face hub: its folder is loaded by the hub's loader, without padless, and computes padless'
bits; several versions live in one process; what cannot be made relative is an error of the build.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import build_hub_kernel
import padless
from padless.checkpoints import from_deepseek
from padless.integrations import fp8_products
from padless.moe import moe
from support.ragged import ROOT

E, H, INTERMEDIATE, T, K = 5, 384, 256, 37, 2
BACKEND = "cpu" if torch.version.cuda is None else "cuda"  # by which the loader chooses, with a GPU or without

# In a process of its own, where importing padless is an error: loads the kernel of a folder, calls it on the tensors of
# a file and stores the results.
CHILD = """
import sys
from pathlib import Path
sys.modules["padless"] = None
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]))
t = torch.load(sys.argv[2])
block = (128, 128)
w13, w2 = (kernel.from_deepseek(t[name], t[name + "_scale"]) for name in ("w13", "w2"))
found = {
    "2d": kernel.matmul_2d(t["x"], t["w13"][0], t["w13_scale"][0], block, torch.float32),
    "batched": kernel.matmul_batched(t["x"], t["w13"], t["w13_scale"], block_size=block, expert_ids=t["ids"][:, 0]),
    "grouped": kernel.matmul_grouped(t["x"], t["w13"], t["w13_scale"], offsets=t["ends"], block_size=block),
    "layer": kernel.moe(t["x"], t["ids"], t["weights"], w13, w2),
}
compiled = torch.compile(lambda x: kernel.matmul_2d(x, t["w13"][0], t["w13_scale"][0], block, torch.float32),
                         backend="eager", fullgraph=True)
found["compiled"] = compiled(t["x"])
torch.save(found, sys.argv[3])
try:
    kernel.matmul_2d(t["x"], t["w13"][0], t["w13_scale"][0], (64, 64), torch.float32)
except ValueError as error:
    print(error)
try:
    kernel.grouped_gemm(kernel.quantize(t["x"], kernel.FP8_BLOCK, kind="activation"), w13, t["ends"], backend="emulator")
except ValueError as error:
    print(error)
print([name for name in sys.modules if name.startswith("padless.")], "padless" in dir(torch.ops))
"""


def problem() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(11)

    def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randn(E, n, k, generator=draw).to(torch.float8_e4m3fn)
        return codes, (torch.rand(E, n // 128, k // 128, generator=draw) + 0.5) / k**0.5

    w13, w13_scale = weights(2 * INTERMEDIATE, H)
    w2, w2_scale = weights(H, INTERMEDIATE)
    ids = torch.rand(T, E, generator=draw).topk(K).indices.int()
    ends = torch.tensor([9, 9, 20, 21, T], dtype=torch.int32)  # one group is empty, one is a row
    x = torch.randn(T, H, generator=draw).to(torch.bfloat16)
    return {"x": x, "ids": ids, "weights": torch.rand(T, K, generator=draw), "ends": ends, "w13": w13, "w2": w2,
            "w13_scale": w13_scale, "w2_scale": w2_scale}  # fmt: skip


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel, loaded into this process next to padless."""
    kernels = pytest.importorskip("kernels", reason="the hub's loader is not installed")
    folder = tmp_path_factory.mktemp("hub")
    build_hub_kernel.build(folder, BACKEND)
    loaded = kernels.get_local_kernel(folder)
    assert kernels.get_local_kernel(folder) is loaded
    return loaded


def test_the_loader_of_the_hub_takes_it_and_it_has_padless_bits(tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="the hub's loader is not installed")
    given = problem()
    torch.save(given, tmp_path / "given.pt")
    build_hub_kernel.build(tmp_path / "hub", BACKEND)
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, *(str(tmp_path / name) for name in ("child.py", "hub", "given.pt", "found.pt"))]
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=free, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sizes, emulator, modules = done.stdout.splitlines()
    assert "weight_block_size is (64, 64)" in sizes
    assert "backend 'emulator' is not available here" in emulator
    assert modules == "[] False", "no module and no operator has padless' own name"
    x, ids, block = given["x"], given["ids"], (128, 128)
    w13, w2 = (from_deepseek(given[name], given[f"{name}_scale"]) for name in ("w13", "w2"))
    wide = fp8_products.matmul(x, given["w13"][0], given["w13_scale"][0], block, torch.float32)
    experts = (given["w13"], given["w13_scale"])
    expected = {
        "2d": wide,
        "compiled": wide,
        "batched": fp8_products.batched_matmul(x, *experts, block_size=block, expert_ids=ids[:, 0]),
        "grouped": fp8_products.grouped_matmul(x, *experts, offsets=given["ends"], block_size=block),
        "layer": moe(x, ids, given["weights"], w13, w2),
    }
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.abs().amax(dim=1).min() > 0, f"{name}: every row says something"
        assert torch.equal(found[name], tensor), name
    dense = given["w13"][0].double() * given["w13_scale"][0].double().repeat_interleave(128, 0).repeat_interleave(
        128, 1
    )
    error = (wide.double() - x.double() @ dense.T).norm(dim=1) / (x.double() @ dense.T).norm(dim=1)
    assert error.max() < 0.05


def test_versions_live_in_one_process(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels of different sources and padless itself: three modules, three sets of operators."""
    changed = tmp_path / "padless"
    build_hub_kernel.shutil.copytree(build_hub_kernel.SOURCE, changed)
    with (changed / "formats.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    monkeypatch.setattr(build_hub_kernel, "SOURCE", changed)
    build_hub_kernel.build(tmp_path / "two", BACKEND)
    two = importlib.import_module("kernels").get_local_kernel(tmp_path / "two")
    assert kernel.__name__ != two.__name__
    assert len({id(module.BlockScaledTensor) for module in (kernel, two, padless)}) == 3
    for module in (kernel, two):
        assert hasattr(getattr(torch.ops, module.__name__.removeprefix("_")), "moe")


def test_transformers_takes_its_products_from_it(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hub's kernel would be, it has the three names that transformers asks for, with its arguments."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setattr(fp8, "is_kernels_available", lambda: True)
    monkeypatch.setattr(fp8, "lazy_load_kernel", lambda name: kernel if name == "finegrained-fp8" else None)
    loaded = fp8.load_finegrained_fp8_kernel()
    assert loaded.matmul is kernel.matmul_2d
    assert loaded.batched_matmul is kernel.matmul_batched
    assert loaded.grouped_matmul is kernel.matmul_grouped
    given = problem()
    arguments = (given["x"], given["w13"], given["w13_scale"], given["ends"], None, (128, 128))
    assert torch.equal(fp8.fp8_grouped_matmul(*arguments), fp8_products.grouped_matmul(*arguments))


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 9, 0)])
def test_an_older_python_gets_a_sentence(tmp_path: Path, version: tuple[int, ...]) -> None:
    variant = build_hub_kernel.build(tmp_path)
    code = f"import sys; sys.version_info = {version}; exec(open({str(variant / '__init__.py')!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: padless needs Python 3.11 or newer" in done.stderr


def test_nothing_in_the_folder_asks_for_padless_by_name(tmp_path: Path) -> None:
    """Also where a test does not come by: every import of every module, and every operator's namespace."""
    variant = build_hub_kernel.build(tmp_path)
    about = json.loads((variant / "metadata.json").read_text())
    assert about["name"] == "padless"
    modules = sorted(variant.rglob("*.py"))
    assert len(modules) > 100
    for path in modules:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.level or (node.module or "").split(".")[0] != "padless", path
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "padless" for alias in node.names), path
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops.padless"):
                assert about["id"].removeprefix("_") in ast.unparse(node), path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                assert "padless" not in ast.unparse(node), path
    sources = {path.name for path in variant.rglob("*.cu")}
    assert "sm90_fp8_grouped_gemm.cu" in sources
    assert (variant / "padless" / "runtime" / "operators.py").read_text().count(about["id"].removeprefix("_")) == 1


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("from padless.formats import A", "ops/x.py", "from ..formats import A"),
        ("from padless.formats import A", "x.py", "from .formats import A"),
        ("from padless.formats import A", "moe/triton/x.py", "from ...formats import A"),
        ("from padless.moe.ops import A", "moe/__init__.py", "from ..moe.ops import A"),
        ("from padless import moe as m", "ops/x.py", "from .. import moe as m"),
        ("def f():\n    from padless.ops import (\n        a,\n    )", "ops/x.py",
         "def f():\n    from ..ops import (\n        a,\n    )"),
        ("import padless", "ops/x.py", "from ... import padless"),
        ("from torch import nn", "ops/x.py", "from torch import nn"),
        ("if TYPE_CHECKING:\n    from padless.nn import A", "x.py", "if TYPE_CHECKING:\n    from .nn import A"),
        ("'''from padless.formats import A'''", "x.py", "'''from padless.formats import A'''"),
    ],
)  # fmt: skip
def test_imports_become_relative(text: str, inside: str, expected: str) -> None:
    assert build_hub_kernel.relative(text, Path(inside)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from padless.verify import x", "ops/x.py:1 imports padless.verify"),
        ("from padless import nn", "ops/x.py:1 imports padless.nn"),
        ("import padless.formats", "cannot make this import relative: import padless.formats"),
        ("a = 1; import padless", "cannot make this import relative"),
        ("import torch, padless", "cannot make this import relative"),
    ],
)
def test_what_cannot_be_made_relative_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_hub_kernel.relative(text, Path("ops/x.py"))


@pytest.mark.gpu
def test_on_the_gpu(tmp_path: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="the hub's loader is not installed")
    build_hub_kernel.build(tmp_path)
    kernel: Any = kernels.get_local_kernel(tmp_path)
    given = {name: tensor.cuda() for name, tensor in problem().items()}
    arguments = (given["x"], given["w13"], given["w13_scale"], given["ends"], None, (128, 128))
    assert torch.equal(kernel.matmul_grouped(*arguments), fp8_products.grouped_matmul(*arguments))


def test_the_page_names_what_the_kernel_offers() -> None:
    from padless.integrations import hub

    page = (ROOT / "docs" / "hub_kernel.md").read_text()
    assert [name for name in hub.__all__ if f"`{name}`" not in page] == []
