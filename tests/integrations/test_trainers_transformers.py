"""Trainers on models of transformers, TRL and verl: how each turns "padless_train" on, and a step of TRL's trainer.

What would convince: a model made in the trainer's way has the logits, bit for bit, of one that was asked for by name;
the name without an underscore in verl's override is no such way; TRL's own SFTTrainer changes the experts by padless.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import padless.autograd
import padless.integrations.transformers
from padless.integrations.transformers import training
from support.hub_checkpoints import VOCABULARY, load, write_bf16

has_trl = find_spec("trl") is not None and find_spec("datasets") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bf16("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe")


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def override(config: Any, values: dict[str, Any]) -> None:
    """verl's own function where it can be imported: one attribute of the configuration for each value."""
    if find_spec("verl") is not None:
        with pytest.MonkeyPatch.context() as patch:
            _names_around_verl(patch)
            import_module("verl.utils.model").update_model_config(config, values)
        return
    for name, value in values.items():
        setattr(config, name, value)


def _names_around_verl(patch: pytest.MonkeyPatch) -> None:
    """Its package without what `import verl` starts, ray among it."""
    import sys

    spec = find_spec("verl")
    assert spec is not None
    for name in ("verl", "verl.utils", "verl.models"):
        package = ModuleType(name)
        package.__path__ = [str(Path(str(spec.origin)).parent.joinpath(*name.split(".")[1:]))]
        patch.setitem(sys.modules, name, package)
    registry = ModuleType("verl.models.registry")
    registry.ModelRegistry = object  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "verl.models.registry", registry)


def test_verl_s_override_of_the_configuration(folder: Path, tmp_path: Path) -> None:
    """Also that a saved model does not ask for padless, and that without the underscore nothing is changed."""
    want = logits(load(folder, experts_implementation=training.TRAIN_NAME))
    for name, is_on in (("_experts_implementation", True), ("experts_implementation", False)):
        config = AutoConfig.from_pretrained(folder)
        override(config, {name: training.TRAIN_NAME})
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16)
        assert (model.get_experts_implementation()[""] == training.TRAIN_NAME) == is_on
        if is_on:
            assert torch.equal(logits(model), want)
            model.config.save_pretrained(tmp_path)
            assert training.TRAIN_NAME not in (tmp_path / "config.json").read_text()


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = import_module("tokenizers")
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.skipif(not has_trl, reason="needs trl and datasets on PYTHONPATH")
def test_trl_trains_by_padless(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step: experts called by padless with a backward pass, the loss near that of transformers' own experts."""
    trl, datasets = import_module("trl"), import_module("datasets")
    ids = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(8)).tolist()
    calls, experts = [], padless.autograd.experts
    monkeypatch.setattr(padless.autograd, "experts", lambda *a: calls.append(a[0].requires_grad) or experts(*a))
    losses: dict[str, float] = {}
    norms: dict[str, float] = {}
    for name in ("eager", training.TRAIN_NAME):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / name), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1, learning_rate=1e-3,
            dataset_kwargs={"skip_prepare_dataset": True},
            model_init_kwargs={"experts_implementation": name, "dtype": "bfloat16"},
        )  # fmt: skip
        table = datasets.table.InMemoryTable.from_pydict({"input_ids": ids})
        data = datasets.Dataset(table, fingerprint="tokens")  # or it would be pickled for its fingerprint
        run = trl.SFTTrainer(str(folder), args=arguments, train_dataset=data, processing_class=tokenizer())
        assert run.model.get_experts_implementation()[""] == name
        run.train()
        losses[name], norms[name] = run.state.log_history[0]["loss"], run.state.log_history[0]["grad_norm"]
    got, want = losses[training.TRAIN_NAME], losses["eager"]
    assert got != want
    assert abs(got - want) < 0.01 * want
    assert abs(norms[training.TRAIN_NAME] - norms["eager"]) < 0.1 * norms["eager"]
    assert calls == [True] * 2, "two layers"
