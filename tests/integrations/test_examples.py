"""The examples, run in small: what they print is what they promise."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM

import padless
from padless.integrations.transformers import adapt_experts
from padless.nn.lora import load_adapter
from support.hub_checkpoints import write_bf16, write_mxfp4

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def number(pattern: str, printed: str) -> float:
    found = re.search(pattern, printed)
    assert found, printed
    return float(found[1])


def test_convert_to_nvfp4(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("convert_to_nvfp4.py", monkeypatch, capsys, "--tokens", "32")
    ratio = number(r"([\d.]+) MB in NVFP4", printed) / number(r"([\d.]+) MB in bfloat16", printed)
    assert 0.27 < ratio < 0.29  # 4.5 bits of 16
    assert 1e-4 < number(r"relative error of the logits: ([\d.]+)", printed) < 0.03
    assert number(r"divergence of the next token: ([\d.]+) nats", printed) < 1e-3
    assert number(r"same most likely token: ([\d.]+)%", printed) > 85


def test_layer_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every step of three ways is timed, all make one layer, and there is a picture; steps in a wrong order are seen."""
    out = tmp_path / "steps"
    printed = run("layer_time.py", monkeypatch, capsys, "--tokens", "9", "--out", str(out))
    (found,) = json.loads(out.with_suffix(".json").read_text())["layers"]
    assert [len(steps) for steps in found["steps"].values()] == [6, 8, 4]
    assert all(us > 0 for steps in found["steps"].values() for *_, us in steps)
    assert number(r"after: (\d+) us", printed) == round(sum(us for *_, us in found["steps"]["after"]))
    assert out.with_suffix(".png").stat().st_size > 10_000

    module = runpy.run_path(str(EXAMPLES / "layer_time.py"))
    steps = {name: (kind, name, make) for kind, name, make in module["BEFORE"]}
    steps["rows"] = ("gather", "rows", lambda s: module["gather"](s).flip(0))
    with pytest.raises(AssertionError, match="another layer"):
        module["step_times"](module["layer"]("small", 9, "cpu"), list(steps.values()))


def test_fine_tune_qwen3_moe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both recipes learn, by other numbers, and what is saved is a model of transformers."""
    small = ("--steps", "6", "--batch", "2", "--length", "48")
    losses = []
    for recipe in ("fp8", "bf16"):
        folder = tmp_path / recipe
        printed = run("fine_tune_qwen3_moe.py", monkeypatch, capsys, "--recipe", recipe, "--save", str(folder), *small)
        first = number(r"loss of the first step ([\d.]+)", printed)
        losses.append(number(r"of the last ([\d.]+)", printed))
        assert losses[-1] < 0.85 * first
    assert abs(losses[0] - losses[1]) < 0.05
    fp8, bf16 = (AutoModelForCausalLM.from_pretrained(tmp_path / recipe).state_dict() for recipe in ("fp8", "bf16"))
    assert any(not torch.equal(fp8[name], bf16[name]) for name in fp8)


def test_rollout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """padless in both programs differs in no bit, anything else does; one layer at a time ends at all of them."""
    out = tmp_path / "rollout.json"
    small = ("--steps", "3", "--layers", "2", "--prompts", "2", "--new-tokens", "5")
    run("rollout.py", monkeypatch, capsys, *small, "--out", str(out))
    record = json.loads(out.read_text())
    pairs = {(p["samples"], p["trains"]): p for p in record["pairs"]}
    assert len(pairs) == 6
    for names, pair in pairs.items():
        same = names == ("padless", "fp8")
        assert (pair["one_pass"]["max"] == 0) == same, names
        assert pair["one_pass"]["max"] < 0.2
    assert pairs["padless", "fp8"]["one_pass"]["equal"] == 1
    assert len(record["layers"]) == 3
    assert record["layers"][-1] == pairs["vLLM", "fp8"]["one_pass"]
    assert all(layer["max"] > 0 for layer in record["layers"])
    run("rollout.py", monkeypatch, capsys, "--draw", str(out))
    assert out.with_suffix(".svg").read_text().count("<path") > 20


def test_vllms_arithmetic() -> None:
    """Near padless' own with the same codes, and with other bits; a product is that of padless' codes in float64.

    But for rows in which x / s and padless' x * (1 / s) round to different codes, which there must be.
    """
    module = runpy.run_path(str(EXAMPLES / "rollout.py"))
    generator = torch.Generator().manual_seed(2)
    x, w13, w2 = (torch.randn(s, generator=generator).bfloat16() for s in ((40, 256), (5, 256, 256), (5, 256, 128)))
    w13, w2 = w13 / 16, w2 / 11
    prob, ids = torch.rand(40, 5, generator=generator).topk(2)
    got = module["vllm_experts"](SimpleNamespace(gate_up_proj=w13, down_proj=w2), x, ids, prob)
    codes = [padless.quantize(w, padless.FP8_BLOCK, kind="weight") for w in (w13, w2)]
    want = padless.moe.moe(x, ids, prob, *codes).double()
    off = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert 1e-4 < off.max() < 0.03
    a = padless.quantize(x, padless.FP8_BLOCK)
    exact = padless.dequantize(a).double() @ padless.dequantize(codes[0])[3].double().T
    found = module["product"](x, codes[0], 3).double()
    divided = (x.float().unflatten(1, (-1, 128)) / a.scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    differ = (divided.float() != a.data.float()).any(1)
    assert 0 < differ.sum() < 10
    assert torch.equal((found - exact).norm(dim=-1) / exact.norm(dim=-1) > 1e-6, differ)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_ep(launcher: list[str]) -> None:
    """By itself, and on two ranks under torchrun: every rank has a line, FP8 near bfloat16, gradients that are there."""
    hidden = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    environment = hidden | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / "ep.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(lines) == (2 if launcher else 1), done.stdout
    for r, line in enumerate(lines):
        assert line.startswith(f"rank {r}: {48 - r} tokens")
        assert 0.02 < number(r"FP8 against bfloat16 ([\d.]+)", line) < 0.1
        assert number(r"\|dx\| ([\d.]+)", line) > 0
        assert number(r"\|dweights\| ([\d.]+)", line) > 0


def with_bytes_as_tokens(folder: Path) -> None:
    """Writes a tokenizer of 256 tokens into a checkpoint's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_a_text_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("finetune_gpt_oss.py", monkeypatch, capsys, "--text", "no.txt")
    assert "--text is no.txt; it must be a UTF-8 file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["random", "folder"])
def test_finetune_gpt_oss(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The held-out loss falls, PEFT's files give a fresh model that loss to the digit, the picture has every step."""
    name, steps, length = "finetune_gpt_oss.py", 12, 48
    checkpoint = []
    if kind == "folder":
        folder = write_mxfp4(write_bf16("gpt_oss", tmp_path / "bf16"), tmp_path / "mxfp4")
        with_bytes_as_tokens(folder)
        checkpoint = [str(folder)]
    settings = [
        "--steps",
        str(steps),
        "--length",
        str(length),
        "--rank",
        "4",
        "--alpha",
        "8",
        "--learning-rate",
        "1e-2",
    ]
    printed = run(name, monkeypatch, capsys, *checkpoint, *settings, "--out", str(tmp_path / "adapter"))
    before, after = (number(rf"([\d.]+) {when}", printed) for when in ("before", "after"))
    assert after < before - 0.2, printed

    module = runpy.run_path(str(EXAMPLES / name))
    text = "\n".join(pydoc_data.topics.topics.values())
    model, tokens = module["load"](checkpoint[0] if checkpoint else None, text, "cpu")
    held_out = module["windows"](tokens[int(len(tokens) * (1 - module["HELD_OUT"])) :], 4, length, 0)
    assert module["mean_loss"](model, held_out) == pytest.approx(before, abs=1e-4)
    experts = adapt_experts(model, rank=4, alpha=8.0, dtype=torch.float32)
    assert load_adapter(tmp_path / "adapter", experts, "default") == ()
    assert module["mean_loss"](model, held_out) == pytest.approx(after, abs=1e-4)

    picture = ElementTree.parse(tmp_path / "adapter" / "loss.svg")
    (line,) = [g for g in picture.iter() if g.get("id") == "losses"]
    assert len(re.findall("[ML]", next(iter(line)).get("d", ""))) == steps
