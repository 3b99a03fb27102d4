"""Doors of engines: any vLLM or SGLang starts with padless installed, and a user who asks for it hears why not."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from itertools import groupby
from typing import Any

import pytest

from padless.integrations import engines
from support.engine_doors import DOORS, Door, installed, names, start
from support.ragged import ROOT

CASES = [(engine, name) for engine in DOORS for name in names(engine)]
MODULES = [(engine, module) for engine in DOORS for module, _ in groupby(names(engine), lambda name: name[0])]
REMEDY = {
    "vllm": "start vLLM without --quantization padless",
    "sglang": "start SGLang without --moe-runner-backend padless",
}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def sentence(engine: str, text: str) -> None:
    """One sentence: what was found, what is needed, the remedy."""
    assert "\n" not in text
    assert f"pip install 'padless[{engine}]'" in text
    assert REMEDY[engine] in text


def test_the_names_are_read() -> None:
    assert ("vllm.model_executor.layers.fused_moe.activation", "ApplyMoEActivationConfig") in names("vllm")
    assert ("vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEExpertsModular") in names("vllm")
    assert ("sglang.srt.plugins.hook_registry", "HookRegistry") in names("sglang")
    assert len(CASES) > 30


@pytest.mark.parametrize("engine", DOORS)
def test_a_served_version_registers_without_a_word(engine: str, lines: pytest.LogCaptureFixture) -> None:
    with installed(DOORS[engine]) as registry:
        start(DOORS[engine])
        start(DOORS[engine])
        assert "padless" in registry
    assert lines.messages == []


@pytest.mark.parametrize("version", ["0.33", "0.33.1rc1.dev5+g1234567", "0.33.7.post1", "dev"])
def test_builds_of_a_served_version(version: str, lines: pytest.LogCaptureFixture) -> None:
    """A build from source may have no number: what it lacks is seen when padless is asked for."""
    with installed(DOORS["vllm"], version):
        start(DOORS["vllm"])
    assert lines.messages == []


@pytest.mark.parametrize("which", [1, 2], ids=["older", "newer"])
@pytest.mark.parametrize("engine", DOORS)
def test_another_version(engine: str, which: int, lines: pytest.LogCaptureFixture) -> None:
    """One line, whatever it still has; the engine starts, and who asks is told or finds no such name."""
    door = DOORS[engine]
    version = door.versions[which]
    with installed(door, version) as registry:
        start(door)
        (line,) = lines.messages
        assert version in line
        assert line.endswith(" goes on")
        sentence(engine, line)
        asked_is_refused(door, registry, version)


def asked_is_refused(door: Door, registry: dict[str, Any], words: str) -> None:
    """Either the name is unknown to the engine, which says so itself, or asking raises one sentence."""
    if "padless" not in registry:
        assert not registry.get("hooks")
        assert not registry.get("choices")
        return
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        door.asked(registry)
    sentence(door.package, str(raised.value))


@pytest.mark.parametrize(("engine", "name"), CASES, ids=lambda value: value if isinstance(value, str) else value[1])
def test_a_name_is_gone(engine: str, name: tuple[str, str], lines: pytest.LogCaptureFixture) -> None:
    gone(engine, name, name[1], lines)


@pytest.mark.parametrize(("engine", "module"), MODULES)
def test_a_module_is_gone(engine: str, module: str, lines: pytest.LogCaptureFixture) -> None:
    gone(engine, module, module, lines)


def gone(engine: str, without: Any, words: str, lines: pytest.LogCaptureFixture) -> None:
    """The start raises nothing. Either padless was refused in one line, or asking for it says what is missing."""
    door = DOORS[engine]
    with installed(door, without=without) as registry:
        start(door)
        assert len(lines.messages) == ("padless" not in registry)
        if lines.messages:
            assert words in lines.text
            sentence(engine, lines.messages[0])
        asked_is_refused(door, registry, words)


@pytest.mark.parametrize("engine", DOORS)
def test_broken_internals(engine: str, lines: pytest.LogCaptureFixture) -> None:
    """An engine whose own function raises something else: one line, too."""
    door = DOORS[engine]

    def broken(registry: dict[str, Any]) -> Any:
        def function(*arguments: Any) -> Any:
            raise TypeError("takes 3 positional arguments\nbut 1 was given")

        return function

    with installed(door._replace(called=dict.fromkeys(door.called, broken))):
        start(door)
    (line,) = lines.messages
    assert "takes 3 positional arguments" in line
    sentence(engine, line)


@pytest.mark.parametrize("engine", DOORS)
def test_versions_are_those_of_the_extra(engine: str) -> None:
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][engine]
    served = {"vllm": engines.VLLM, "sglang": engines.SGLANG}[engine]
    assert extra == f"{engine}>={served.first},<{served.end}"


def test_vllm_asks_the_class_of_everybody() -> None:
    """`override_quantization_method` is called for each quantized checkpoint, in other versions with more arguments."""
    with installed(DOORS["vllm"]) as registry:
        start(DOORS["vllm"])
        claim = registry["padless"].override_quantization_method
        assert claim({"quant_method": "fp8"}, None, hf_config=None, more=1) is None
        assert claim({"quant_method": "fp8"}, "padless", hf_config=None, more=1) == "padless"
        assert claim({"quant_method": "awq"}, "padless") is None


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from support.engine_doors import DOORS, installed, start
before = set(sys.modules)
with installed(DOORS[{engine!r}]) as registry:
    start(DOORS[{engine!r}])
    assert "padless" in registry
    print(*sorted(name for name in set(sys.modules) - before if name.split(".")[0] != {engine!r}))
"""


@pytest.mark.parametrize("engine", DOORS)
def test_nothing_heavy_is_imported_for_who_did_not_ask(engine: str) -> None:
    program = PROGRAM.format(paths=[str(ROOT / "src"), str(ROOT / "tests")], engine=engine)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = [name for name in done.stdout.split() if name.startswith("padless")]
    plugin = f"padless.integrations.{engine}"
    own = {"vllm": f"{plugin}.config", "sglang": f"{plugin}.hooks"}[engine]
    assert imported == [
        "padless",
        "padless._version",
        "padless.deprecation",
        "padless.integrations",
        "padless.integrations.engines",
        plugin,
        own,
    ]
