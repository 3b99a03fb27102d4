"""examples/rollout.py --engine without vLLM: what an engine gives is taken apart as it should be, compared and drawn.

The engine's place is taken by a stand-in that computes nothing, then by transformers with the checkpoints that the
example wrote.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from support import stand_in_modules
from support.hub_checkpoints import experts_of, load

EXAMPLES = Path(__file__).parents[2] / "examples"
KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"
LAYERS, LENGTH, NEW = 2, 4, 3


def log_probability(position: int, token: int) -> float:
    """Of the stand-in's model: another number for each token of each position."""
    return -position - token / 1000


class Kernel:
    """Adds one to the rows where they lie, as an engine may."""

    def apply(self, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *, activation: Any) -> Any:
        return hidden_states.add_(1)


class Engine:
    """Samples position % 7 in every position; its layers see the positions of the tokens they are called with."""

    down: list[Engine] = []  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.layers = [Kernel() for _ in range(LAYERS)]
        core = SimpleNamespace(shutdown=lambda: self.down.append(self))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def _layers(self, positions: list[int]) -> None:
        for layer in self.layers:
            rows = torch.tensor(positions).float()[:, None]
            ids = torch.zeros(len(positions), 1, dtype=torch.int32)
            # Both ways to call it are vLLM's.
            if layer is self.layers[0]:
                layer.apply(rows, None, None, torch.ones(len(positions), 1), ids, activation=None)
            else:
                layer.apply(hidden_states=rows, w1=None, w2=None, topk_weights=ids + 1.0, topk_ids=ids, activation=None)

    def generate(self, prompts: list[Any], sampling: SimpleNamespace, use_tqdm: bool) -> list[Any]:
        assert sampling.ignore_eos
        return [self._serve(each["prompt_token_ids"], sampling) for each in prompts]

    def _serve(self, prompt: list[int], sampling: SimpleNamespace) -> Any:
        def step(position: int, token: int) -> dict[int, Any]:
            tokens = (token, 100)  # the most likely one beside it
            return {t: SimpleNamespace(logprob=log_probability(position, t)) for t in tokens}

        self._layers(list(range(len(prompt))))
        tokens, steps = [], []
        for position in range(len(prompt), len(prompt) + sampling.max_tokens):
            tokens.append(position % 7)
            steps.append(step(position, tokens[-1]))
        of_prompt = [None, *(step(i, t) for i, t in enumerate(prompt[1:], 1))] if sampling.prompt_logprobs else None
        output = SimpleNamespace(token_ids=tuple(tokens), logprobs=steps)
        return SimpleNamespace(outputs=[output], prompt_logprobs=of_prompt)


def sampling_params(**named: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"prompt_logprobs": None} | named))


def test_what_an_engine_gives_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of the sampled tokens, token by token and in one pass; calls with inputs as they came."""
    contents = {
        "vllm": {"LLM": Engine, "SamplingParams": sampling_params},
        "vllm.distributed": {"cleanup_dist_env_and_memory": lambda: None},
        KERNEL: {"FusedMoEKernel": Kernel},
    }
    stand_in_modules.put(monkeypatch, contents)
    plug_in = ModuleType("padless.integrations.vllm")
    registered: list[bool] = []
    plug_in.__dict__["register"] = lambda: registered.append(True)
    monkeypatch.setitem(sys.modules, "padless.integrations.vllm", plug_in)
    monkeypatch.setattr(Engine, "down", [])
    example = runpy.run_path(str(EXAMPLES / "rollout_engine.py"))
    for name in example["ENVIRONMENT"]:
        monkeypatch.setenv(name, "0")
    plain = Kernel.apply
    prompts = torch.tensor([[9, 8, 7, 6], [1, 2, 3, 5]])
    rollout = example["sample"](Path("folder"), {"quantization": "padless"}, prompts, NEW)
    new = [position % 7 for position in range(LENGTH, LENGTH + NEW)]
    assert rollout.ids.tolist() == [[*row, *new] for row in prompts.tolist()]
    want = torch.tensor([[log_probability(LENGTH + i, t) for i, t in enumerate(new)]] * 2)
    assert torch.equal(rollout.generated, want)
    assert torch.equal(rollout.one_pass, want)
    assert [layer for layer, *_ in rollout.calls] == [0, 1] * 4  # two prompts, sampled and scored
    for layer, rows, ids, weights, out in rollout.calls:
        assert rows.flatten().tolist() == list(range(rows.shape[0])), layer
        assert torch.equal(out, rows + 1)
        assert ids.dtype == torch.int32
        assert weights.unique().tolist() == [1]
    (engine,) = Engine.down
    assert engine.arguments["quantization"] == "padless"
    assert engine.arguments["max_model_len"] > LENGTH + NEW
    assert registered == [True]
    assert Kernel.apply is plain


def transformers_engine(rollout: Any) -> Any:
    """`sample` by transformers with the checkpoint, on a CPU."""

    def sample(folder: Path, arguments: dict[str, Any], prompts: torch.Tensor, new: int) -> Any:
        model = load(folder, **arguments)
        calls: list[Any] = []
        for i, experts in enumerate(experts_of(model)):
            experts.register_forward_hook(lambda _, given, out, i=i: calls.append((i, *given, out.clone())))
        length = prompts.shape[1]
        ids = torch.cat([prompts, torch.arange(new).expand(prompts.shape[0], -1)], 1)
        with torch.no_grad():
            logits = model(ids).logits[:, length - 1 : -1].float()
        of_ids = logits.log_softmax(-1).gather(-1, ids[:, length:, None])[..., 0]
        return rollout(ids, of_ids, of_ids, calls)

    return sample


def test_an_engines_rollout_is_compared_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With padless' experts and the written codes an engine has the bits of the model that trains, else it has not."""
    example = runpy.run_path(str(EXAMPLES / "rollout_engine.py"))
    assert {checkpoint for checkpoint, _ in example["ENGINES"].values()} == {"fp8", "bf16"}
    engines = {
        "padless": ("fp8", {"experts_implementation": "padless"}),
        "bf16": ("bf16", {"experts_implementation": "eager"}),
    }
    stand_in = ModuleType("rollout_engine")
    stand_in.__dict__.update(ENGINES=engines, sample=transformers_engine(example["Rollout"]))
    monkeypatch.setitem(sys.modules, "rollout_engine", stand_in)
    stand_in_modules.put(monkeypatch, {"vllm": {"__version__": "0"}})
    out = tmp_path / "rollout.json"
    spec = importlib.util.spec_from_file_location("rollout", EXAMPLES / "rollout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What transformers alone does has a test of its own.
    bits = dict.fromkeys(("mean", "max", "kl", "equal"), 0.5)
    pair = {"samples": "bf16", "trains": "fp8", "one_pass": bits, "generated": bits}
    monkeypatch.setattr(module, "compared", lambda *_: {"pairs": [pair], "layers": [bits] * 3})
    small = ("--steps", "1", "--layers", "2", "--prompts", "2", "--new-tokens", "3")
    monkeypatch.setattr(sys, "argv", ["rollout.py", *small, "--engine", "--out", str(out)])
    module.main()
    record = json.loads(out.read_text())
    assert {"date", "device", "versions", "kernels", "torch", "transformers"} <= record.keys()
    found = {(p["samples"], p["trains"]): p["one_pass"] for p in record["engine"]["pairs"]}
    assert [names for names, each in found.items() if each["max"] == 0] == [("padless", "fp8")]
    assert all(each["kl"] >= 0 for each in found.values())
    experts = record["engine"]["experts"]
    assert {each["rows"] for each in experts.values()} == {2 * 2 * (32 + 3)}
    assert experts["padless"]["fp8"] == {"equal": 1, "error": 0}
    for name, against in (("padless", "bf16"), ("padless", "vLLM"), ("bf16", "fp8"), ("bf16", "vLLM")):
        assert experts[name][against]["equal"] < 0.5, name
        assert 1e-5 < experts[name][against]["error"] < 0.1, name
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--draw", str(out)])
    module.main()
    assert out.with_suffix(".svg").read_text().count("<path") > 40


def test_difference_of_log_probabilities() -> None:
    """By hand: one token alike, one for which what trains has half the probability."""
    difference = runpy.run_path(str(EXAMPLES / "rollout.py"))["difference"]
    a = torch.tensor([[0.25, 0.5]]).log()
    found = difference(a, torch.tensor([[0.25, 0.25]]).log())
    two = float(torch.tensor(2.0).log())
    want = {"mean": two / 2, "max": two, "kl": (0.5 - 1 + two) / 2, "equal": 0.5}
    assert found == pytest.approx(want, abs=1e-6)
