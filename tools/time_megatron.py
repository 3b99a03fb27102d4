"""Times Megatron-Core's own MoELayer, forward and backward on one GPU, with its experts and with padless'.

`PYTHONPATH=src:FOLDER python tools/time_megatron.py --out FILE`, where megatron-core is unpacked in FOLDER, writes a
record: medians in microseconds, of the GPU and from the call to its end, in turns. The layer has Qwen3-30B-A3B's sizes,
its router and dispatcher are Megatron's ("alltoall", one rank). Of Megatron's experts one class runs with torch alone,
SequentialMLP; its TEGroupedMLP takes any grouped linear layers, here torch._grouped_mm in the place of Transformer
Engine's. Weights, tokens and gradients of outputs are the same. A contender whose output or gradient is further from the
first one's than its limit is not timed. What the experts alone take, on the rows that the dispatcher gave them, is timed
too. With `--transformer-engine CHECKOUT` the layer is also timed with Transformer Engine's permutation of rows, which is
written in Triton; the compiled part of Transformer Engine is not needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from padless._version import package_version
from padless.bench.cases.problems.layer import MODELS
from padless.testing import machine
from padless.testing.judge import describe
from padless.testing.timing import FLUSH, Call, Timer

TOKENS = (8192, 32768)
SEQUENTIAL, GROUPED = "Megatron SequentialMLP", "Megatron TEGroupedMLP with torch._grouped_mm"
BF16, FP8 = "padless bf16", "padless fp8"
# |difference| / |expected| of the output and of each gradient.
LIMITS = {SEQUENTIAL: 0.02, GROUPED: 0.02, BF16: 0.02, FP8: 0.12}


class GroupedMm(nn.Module):
    """Linear layers of experts as `TEGroupedMLP` asks for them: weight (E, N, K), by torch._grouped_mm."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else "cuda"
        self.weight = nn.Parameter(torch.empty((experts, outputs, inputs), dtype=config.params_dtype, device=device))

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """(x (M, K) times each expert's weight, None)."""
        counts = torch.tensor(tokens_per_expert, dtype=torch.int32, pin_memory=x.is_cuda)
        offs = counts.to(x.device, non_blocking=True).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offs), None

    def backward_dw(self) -> None:
        """Nothing waits."""


def load_fused_permutation(checkout: Path) -> None:
    """Gives Megatron the permutation of a checkout of Transformer Engine, whose compiled part is not built.

    Its functions of masks are Triton kernels; the modules that it imports for quantized rows are stood in for.
    """
    used = import_module("megatron.core.transformer.moe.moe_utils")  # before there is a transformer_engine
    package, known = "transformer_engine", set(sys.modules)
    for name in (package, f"{package}.common", f"{package}.common.triton", f"{package}.pytorch",
                 f"{package}.pytorch.triton", f"{package}.pytorch.tensor"):  # fmt: skip
        folder = ModuleType(name)
        folder.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = folder
    types: dict[str, dict[str, Any]] = {
        "constants": {"TE_DType": {}},
        "quantized_tensor": {"QuantizedTensor": None, "_quantized_tensor_passthrough_ops": set()},
        "tensor.float8_tensor": {"Float8Tensor": None},
        "tensor.float8_blockwise_tensor": {"Float8BlockwiseQTensor": None},
        "tensor.mxfp8_tensor": {"MXFP8Tensor": None},
    }
    sys.modules["transformer_engine_torch"] = ModuleType("transformer_engine_torch")
    for name, values in types.items():
        module = ModuleType(f"{package}.pytorch.{name}")
        for value, stand_in in values.items():
            setattr(module, value, type(value, (), {}) if stand_in is None else stand_in)
        sys.modules[module.__name__] = module
    given = import_module(f"{package}.pytorch.permutation")
    for name in (
        "permute", "permute_with_probs", "unpermute", "sort_chunks_by_index", "sort_chunks_by_index_with_probs"
    ):  # fmt: skip
        setattr(used, f"fused_{name}", getattr(given, f"moe_{name}"))
    for name in [n for n in sys.modules if n.startswith(package) and n not in known]:
        del sys.modules[name]  # others ask whether it is installed
    setattr(used, "HAVE_TE", True)  # noqa: B010
    setattr(used, "is_te_min_version", lambda version, **_: True)  # noqa: B010


def config_of(sizes: Sequence[int], device: str, fused: bool = False) -> Any:
    """Megatron's configuration of (E, k, H, I): bfloat16, SwiGLU, a router without an auxiliary loss.

    fused: with the permutation that `load_fused_permutation` gave.
    """
    experts, top_k, hidden, intermediate = sizes
    return import_module("megatron.core.transformer").TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=32 if hidden >= 1024 else 4, num_moe_experts=experts,
        moe_ffn_hidden_size=intermediate, ffn_hidden_size=intermediate, moe_router_topk=top_k, add_bias_linear=False,
        gated_linear_unit=True, activation_func=nn.functional.silu, params_dtype=torch.bfloat16, bf16=True,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="alltoall", bias_activation_fusion=True,
        moe_router_dtype="fp32", moe_permute_fusion=fused, use_cpu_initialization=device == "cpu",
        perform_initialization=False,
    )  # fmt: skip


def builders() -> dict[str, Any]:
    """Builders of each contender's experts, as `MoESubmodules` takes them."""
    experts = import_module("megatron.core.transformer.moe.experts")
    layers = import_module("megatron.core.tensor_parallel.layers")
    mlp = import_module("megatron.core.transformer.mlp")
    plugin = import_module("padless.integrations.megatron")
    one = mlp.MLPSubmodules(linear_fc1=layers.ColumnParallelLinear, linear_fc2=layers.RowParallelLinear)
    all_of_them = experts.GroupedMLPSubmodules(linear_fc1=GroupedMm, linear_fc2=GroupedMm)

    def made(kind: Any, parts: Any) -> Callable[..., Any]:
        return lambda n, config, *, pg_collection, name=None: kind(n, config, parts, pg_collection=pg_collection)

    return {
        SEQUENTIAL: made(experts.SequentialMLP, one),
        GROUPED: made(experts.TEGroupedMLP, all_of_them),
        BF16: plugin.experts_spec("bf16"),
        FP8: plugin.experts_spec("fp8"),
    }


def weights_of(layer: Any) -> dict[str, list[torch.Tensor]]:
    """Parameters of a layer's experts, whole or one an expert: w13, gate above up, and w2."""
    experts = layer.experts
    if hasattr(experts, "w13"):
        return {"w13": [experts.w13], "w2": [experts.w2]}
    if hasattr(experts, "linear_fc1"):
        return {"w13": [experts.linear_fc1.weight], "w2": [experts.linear_fc2.weight]}
    return {
        "w13": [e.linear_fc1.weight for e in experts.local_experts],
        "w2": [e.linear_fc2.weight for e in experts.local_experts],
    }


class Problem:
    """Layers of the same weights, one a contender, tokens x (T, 1, H) and the output's gradient."""

    def __init__(self, sizes: Sequence[int], tokens: int, device: str, fused: bool = False) -> None:
        experts, _, hidden, intermediate = sizes
        generator = torch.Generator(device).manual_seed(tokens)

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

        self.x, self.dout = drawn(tokens, 1, hidden).requires_grad_(), drawn(tokens, 1, hidden)
        w13 = drawn(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
        w2 = drawn(experts, hidden, intermediate, scale=intermediate**-0.5)
        router = drawn(experts, hidden, scale=hidden**-0.5)
        moe = import_module("megatron.core.transformer.moe.moe_layer")
        self.layers = {}
        with torch.no_grad():
            for name, made in builders().items():
                config = config_of(sizes, device, fused)
                layer = moe.MoELayer(config, moe.MoESubmodules(experts=made), layer_number=1).to(device).train()
                layer.router.weight.copy_(router)
                for whole, parts in ((w13, weights_of(layer)["w13"]), (w2, weights_of(layer)["w2"])):
                    for part, values in zip(parts, whole if len(parts) > 1 else [whole], strict=True):
                        part.copy_(values)
                self.layers[name] = layer

    def step(self, name: str) -> torch.Tensor:
        """The output (T, 1, H) of a forward and a backward pass; gradients are left where they are."""
        self.x.grad = None
        for parameter in self.layers[name].parameters():
            parameter.grad = None
        out: torch.Tensor = self.layers[name](self.x)[0]
        out.backward(self.dout)
        return out.detach()

    def experts_alone(self, name: str) -> Call:
        """A call of the experts of a layer, forward and backward, on the rows that its dispatcher gives them."""
        layer, given = self.layers[name], []
        handle = layer.experts.register_forward_pre_hook(lambda _, arguments: given.extend(arguments))
        with torch.no_grad():
            layer(self.x)
        handle.remove()
        rows, counts, probs = given
        rows, probs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
        dout = self.dout[:, 0].repeat(-(-len(rows) // len(self.dout)), 1)[: len(rows)].contiguous()

        def step() -> torch.Tensor:
            rows.grad = probs.grad = None
            for parameter in layer.experts.parameters():
                parameter.grad = None
            out: torch.Tensor = layer.experts(rows, counts, probs)[0]
            out.backward(dout)
            return out.detach()

        return step

    def results(self, name: str) -> dict[str, torch.Tensor]:
        """The output and all gradients of a step."""
        out, layer = self.step(name), self.layers[name]
        assert self.x.grad is not None
        found = {"out": out, "x": self.x.grad, "router": layer.router.weight.grad}
        for weight, parts in weights_of(layer).items():
            grads: list[Any] = [part.grad for part in parts]
            found[weight] = torch.stack(grads) if len(grads) > 1 else grads[0]
        return found


def measure(
    sizes: Sequence[int], tokens: int, timer: Timer, device: str = "cuda", fused: bool = False
) -> dict[str, Any]:
    """A record of one number of tokens."""
    problem = Problem(sizes, tokens, device, fused)
    whose = "Transformer Engine's" if fused else "Megatron's"
    record: dict[str, Any] = {"sizes": list(sizes), "tokens": tokens, "permutation": whose}
    record |= {"errors": {}, "off": {}, "wrong": {}}
    wanted: Mapping[str, torch.Tensor] = {}
    right: dict[str, Call] = {}
    for name in problem.layers:
        try:
            found = problem.results(name)
        except Exception as error:
            record["errors"][name] = describe(error)
            continue
        wanted = wanted or found
        off = {what: float((found[what] - t).float().norm() / t.float().norm()) for what, t in wanted.items()}
        record["off"][name] = off
        if all(value <= LIMITS[name] for value in off.values()):
            right[name] = partial(problem.step, name)
        else:
            record["wrong"][name] = f"is wrong: off by {off}, allowed {LIMITS[name]}"
        print(f"{tokens} tokens, {whose} permutation, {name}: off by at most {max(off.values()):.4f}", flush=True)
    alone = {name: problem.experts_alone(name) for name in right}
    for clock, timed, calls in (
        ("end_to_end", timer.end_to_end, right), ("gpu", timer.gpu, right), ("experts", timer.gpu, alone)
    ):  # fmt: skip
        record[clock] = {name: timing.as_dict() for name, timing in timed(calls).items()}
    return record


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, as its file COMMIT says, or git."""
    written = checkout / "COMMIT"
    if written.exists():
        return written.read_text(encoding="utf-8").strip()
    return subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True).strip()


def start_megatron(backend: str) -> None:
    """Megatron's process groups, of this process alone."""
    torch.distributed.init_process_group(backend, f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    import_module("megatron.core.parallel_state").initialize_model_parallel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the record and a table; 1 where a contender raised or is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--transformer-engine", type=Path, metavar="CHECKOUT")
    given = parser.parse_args(arguments)
    torch.cuda.set_device(0)
    start_megatron("nccl")
    import_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(0)
    timer = Timer(given.repeats, pause_s=0.002)
    engine: Path | None = given.transformer_engine
    if engine is not None:
        load_fused_permutation(engine)
    record: dict[str, Any] = {
        "kind": "megatron",
        "machine": machine.describe(),
        "megatron-core": import_module("megatron.core").__version__,
        "transformer-engine": package_version("transformer-engine"),
        "transformer-engine's permutation": None if engine is None else commit_of(engine),
        "repeats": given.repeats,
        "flush": FLUSH,
        "points": [],
    }
    for tokens, fused in product(TOKENS, (False,) if engine is None else (False, True)):
        found = measure(MODELS["Qwen3-30B"], tokens, timer, fused=fused) | {"clocks": machine.clocks()}
        record["points"].append(found)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for name, timing in found["end_to_end"].items():
            gpu, experts = found["gpu"][name]["us"], found["experts"][name]["us"]
            us = f"{timing['us']:10.1f} us, GPU {gpu:10.1f}, experts alone {experts:10.1f}"
            print(f"{tokens:6} {found['permutation']} permutation, {name:45} {us}", flush=True)
        torch.cuda.empty_cache()
    for found in record["points"]:
        for name, what in (found["errors"] | found["wrong"]).items():
            print(f"{found['tokens']} tokens, {name}: {what}", file=sys.stderr)
    torch.distributed.destroy_process_group()
    return int(any(found["errors"] or found["wrong"] for found in record["points"]))


if __name__ == "__main__":
    sys.exit(main())
