"""Frameworks that are not installed: padless imports none of them, and each plug-in says what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SENTENCES = {
    "vllm": "needs vLLM 0.33: pip install 'padless[vllm]'",
    "sglang": "needs SGLang 0.5.23: pip install 'padless[sglang]'",
    "torchtitan": "needs torchtitan 0.3: pip install 'padless[torchtitan]'",
    "torchao": "needs torchao 0.18: pip install 'padless[torchao]'",
    "megatron": "needs Megatron-Core 0.16 or newer: pip install 'padless[megatron]'",
    "transformers": "needs transformers 5.17 or newer: pip install 'padless[transformers]'",
}
PROGRAM = """
import sys
from importlib import import_module

import padless, padless.moe, padless.integrations

names = sys.argv[1:]
assert not set(names) & set(sys.modules), set(names) & set(sys.modules)
for name in names:
    sys.modules[name] = None  # as if it were not installed
for name in names:
    try:
        import_module(f"padless.integrations.{name}")
    except ImportError as error:
        print(error)
"""


def test_nothing_is_imported_and_each_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *SENTENCES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"padless.integrations.{name} {sentence}" for name, sentence in SENTENCES.items()
    ]


def test_extras_bring_what_the_sentences_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in SENTENCES:
        assert any(requirement.startswith(name) for requirement in extras[name])
