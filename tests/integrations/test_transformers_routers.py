"""Routers of transformers' models by padless.moe.topk, against their own forwards."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from padless.integrations.transformers import use_padless_routers
from padless.integrations.transformers.routers import KNOWN, ROUNDED_SOFTMAX, SIGMOID, rule_of
from padless.moe import Router

H, E = 48, 24
CONFIG = {
    "hidden_size": H,
    "num_experts_per_tok": 4,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}


@lru_cache
def sources() -> dict[str, Path]:
    """Where transformers defines each of its routers."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for line in path.read_text().splitlines():
            if line.startswith("class ") and "outer(" in line:
                found[line.removeprefix("class ").split("(")[0]] = path
    return found


def router(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    """A router with random weights and bias."""
    if name not in sources():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    path = sources()[name]
    kind = getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)
    module = kind(SimpleNamespace(**(CONFIG | config)))
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() == 2 else 0.05))
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def tokens(dtype: torch.dtype = torch.float32, count: int = 200) -> torch.Tensor:
    return torch.randn((count, H), generator=torch.Generator().manual_seed(7)).to(dtype)


def test_all_that_are_named_are_there() -> None:
    """Of 5.23, against which these tests run; 5.17 lacks some."""
    if transformers.__version__ == "5.23.0":
        assert [name for name in KNOWN if name not in sources()] == []


@pytest.mark.parametrize("name", KNOWN)
def test_ids_and_weights(name: str) -> None:
    for seed, more in enumerate(({}, {"norm_topk_prob": False}, {"n_group": 1, "topk_group": 1})):
        module = router(name, seed=seed, **more)
        x = tokens()
        logits, weights, ids = module(x)
        use_padless_routers(module)
        got = module(x)
        assert torch.equal(got[0], logits)
        assert (got[1].dtype, got[2].dtype) == (weights.dtype, torch.int64)
        # In an order of their own where transformers asks torch for none.
        order, got_order = ids.argsort(1), got[2].argsort(1)
        assert torch.equal(got[2].gather(1, got_order), ids.gather(1, order))
        weights, got_weights = weights.gather(1, order), got[1].gather(1, got_order)
        assert ((got_weights - weights).abs() <= 2**-20 * weights.abs()).all()


@pytest.mark.parametrize("name", ["MixtralTopKRouter", "Qwen3MoeTopKRouter", "GptOssTopKRouter", "Glm4MoeTopkRouter"])
def test_bfloat16(name: str) -> None:
    module = router(name, torch.bfloat16)
    x = tokens(torch.bfloat16)
    logits, weights, ids = module(x)
    with torch.device("meta"):  # where a caller has tensors made is no matter
        use_padless_routers(module)
    got = module(x)
    assert torch.equal(got[0], logits)
    assert got[1].dtype == weights.dtype
    bound = 2**-7 if name in ROUNDED_SOFTMAX else 2**-20
    assert ((got[1].sort(1).values - weights.sort(1).values).abs() <= bound * weights.sort(1).values).all()
    # Equal logits, of which a bfloat16 router has many, may be other experts; their logits are the same.
    by_logit = [logits.gather(1, i).sort(1).values for i in (got[2], ids)]
    if name not in SIGMOID:
        assert torch.equal(*by_logit)


@pytest.mark.parametrize("name", ["MixtralTopKRouter", "DeepseekV3TopkRouter"])
def test_gradients(name: str) -> None:
    found = []
    for padless_ in (False, True):
        module = router(name)
        x = tokens().requires_grad_()
        if padless_:
            use_padless_routers(module)
        weights, ids = module(x)[1:]
        table = torch.randn((x.shape[0], E), generator=torch.Generator().manual_seed(1))
        (weights * table.gather(1, ids)).sum().backward()
        found.append((x.grad, module.weight.grad))
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


def test_rules() -> None:
    assert rule_of(router("MixtralTopKRouter")) == Router(4)
    assert rule_of(router("Qwen3MoeTopKRouter", norm_topk_prob=False)) == Router(4, renormalize=False)
    assert rule_of(router("GptOssTopKRouter")) == Router(4)
    want = Router(4, "sigmoid", scaling_factor=2.5, num_expert_groups=4, top_groups=2)
    assert rule_of(router("DeepseekV3TopkRouter")) == want


def test_copies_pickles_and_compiled_ones() -> None:
    module = use_padless_routers(router("DeepseekV3TopkRouter"))
    want = module(tokens())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(other(tokens()), want, strict=True))
        other.weight.data.neg_()
        assert not torch.equal(other(tokens())[1], want[1])
    assert torch.equal(module(tokens())[1], want[1])
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(compiled(tokens()), want, strict=True))


def test_under_hooks_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module = router("MixtralTopKRouter")
    seen = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: Any, *arguments: Any, **named: Any) -> Any:
            seen.append(module)
            return arguments, named

    hooks.add_hook_to_module(module, Hook())
    use_padless_routers(module)
    want = router("MixtralTopKRouter")(tokens())
    got = module(tokens())
    assert seen == [module]
    assert torch.equal(got[2], want[2])
    assert module._old_forward.args[1] == Router(4)


def test_a_router_of_another_rule_is_refused() -> None:
    """A class of a known name that computes something else, as another version's might."""

    def replaced(index: int, by: Any) -> Any:
        right = router("MixtralTopKRouter")
        original = type(right).forward

        def forward(self: Any, x: torch.Tensor) -> Any:
            found = list(original(self, x))
            found[index] = by(found[index])
            return tuple(found)

        right.__class__ = type("MixtralTopKRouter", (type(right),), {"forward": forward})
        return right

    for index, by in ((1, lambda w: w * 1.001), (1, lambda w: w.bfloat16()), (2, lambda ids: ids.int())):
        wrong = replaced(index, by)
        with pytest.raises(ValueError, match="does not give what padless knows"):
            use_padless_routers(wrong)
        assert "forward" not in vars(wrong)
    use_padless_routers(replaced(0, lambda logits: logits))
    swapped = router("MixtralTopKRouter")
    original = type(swapped).forward
    order = {"forward": lambda self, x: original(self, x)[::-1]}
    swapped.__class__ = type("MixtralTopKRouter", (type(swapped),), order)
    with pytest.raises(ValueError, match="does not give what padless knows"):
        use_padless_routers(swapped)


def test_a_model_without_a_known_router_is_refused() -> None:
    with pytest.raises(ValueError, match="no router that padless knows"):
        use_padless_routers(nn.Sequential(nn.Linear(2, 2)))


def test_a_model() -> None:
    """All routers of a model, in its place behind the experts implementation."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.normal_()
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        want = model(ids).logits
        assert use_padless_routers(model) is model
        got = model(ids).logits
    assert all("forward" in vars(layer.mlp.gate) for layer in model.model.layers)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


def forwards() -> Iterator[tuple[str, str]]:
    for path in {*sources().values()}:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in sources():
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        yield node.name, ast.unparse(method)


@pytest.mark.slow
def test_every_router_of_a_known_forward_is_named() -> None:
    found = dict(forwards())
    known = {found[name] for name in KNOWN if name in found}
    assert {name for name, text in found.items() if text in known} == {name for name in KNOWN if name in found}
