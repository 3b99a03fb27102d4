"""PTX and launches that ask for more than there is: one sentence at once, and no memory or stack used up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from padless.emulator import Emulator, EmulatorError, LaunchError, PtxSyntaxError, UnsupportedInstruction
from padless.emulator.cli import app
from padless.emulator.launch_file import read_description

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
BODIES = {
    ".reg .b32 %r<2000000000>;": "makes more than 1048576 registers in k",
    ".reg .b32 %r<600000>; .reg .b32 %s<600000>;": "makes more than 1048576 registers in k",
    "{" * 20_000 + "}" * 20_000: "more than 200 scopes",
    "mov.b32 %r, " + "{" * 20_000 + "1" + "}" * 20_000 + ";": "more than 20 others",
    "mov.b32 %r, " + "-" * 20_000 + "1;": "more than 20 others",
    ".local .b8 deep[1099511627776];": "variable deep has 1099511627776 bytes",
}


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_body_beyond_the_bounds(body: str) -> None:
    with pytest.raises(PtxSyntaxError, match=BODIES[body]):
        Emulator(HEAD + ".visible .entry k() {" + body + " ret; }")


@pytest.mark.parametrize("declared", ["x[1099511627776]", "x[1048576][1048576]"])
def test_a_variable_beyond_the_bounds(declared: str) -> None:
    with pytest.raises(PtxSyntaxError, match="variable x has 1099511627776 bytes, allowed are 1073741824"):
        Emulator(HEAD + f".global .b8 {declared};")


def test_what_is_within_the_bounds_is_read() -> None:
    body = "{" * 150 + "}" * 150 + ".reg .b32 %r<1000>; mov.b32 %r1, -1;"
    Emulator(HEAD + ".visible .entry k() {" + body + " ret; }").launch("k", 2, 32, []).raise_on_reports()


def test_a_grid_beyond_the_bounds() -> None:
    emulator = Emulator(HEAD + ".visible .entry k() { ret; }")
    with pytest.raises(LaunchError, match="has more CTAs than the emulator runs"):
        emulator.launch("k", (2**31 - 1, 65535, 65535), 32, [])


@pytest.mark.parametrize("text", ["[1, 2]", "3", '"grid"', "null", "[" * 100_000])
def test_a_launch_description_that_is_no_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(LaunchError, match=r"launch\.json"):
        read_description(path)


def test_calls_that_double_at_every_level() -> None:
    """Twenty levels of two calls each are a million copies of the last function."""
    text = HEAD + ".func f0() { mov.u32 %r1, 1; mov.u32 %r1, 2; ret; }".replace("{", "{ .reg .b32 %r<3>;")
    for level in range(1, 20):
        text += f".func f{level}() {{ call f{level - 1}; call f{level - 1}; ret; }}"
    emulator = Emulator(text + ".visible .entry k() { call f19; ret; }")
    with pytest.raises(UnsupportedInstruction, match="more than 1048576 instructions"):
        emulator.program("k")


def test_memory_that_the_bound_does_not_allow() -> None:
    variables = "".join(f".global .b8 x{i}[1000000000];" for i in range(9))
    with pytest.raises(LaunchError, match=r"variables take about 8,583 MiB, allowed are 8,192; .*--max-memory"):
        Emulator(HEAD + variables)
    body = ".local .b8 deep[67108864]; ret;"
    emulator = Emulator(HEAD + ".visible .entry k() {" + body + "}", max_memory=1 << 20)
    with pytest.raises(LaunchError, match="the CTAs that run at once take about"):
        emulator.launch("k", 1, 1024, [])
    many = ".reg .b64 %r<500>;" + "".join(f"mov.b64 %r{i}, {i};" for i in range(500))
    wide = Emulator(HEAD + ".visible .entry k() {" + many + " ret; }", max_memory=8 << 20)
    with pytest.raises(LaunchError, match="the CTAs that run at once take about"):
        wide.launch("k", 1, 1024, [])


X = {"dtype": "float32", "shape": [4]}
DESCRIPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "grid of letters": ({"grid": "abc"}, "grid is 'abc'"),
    "grid of nothing": ({"grid": None}, "grid is None"),
    "empty grid": ({"grid": []}, "grid is"),
    "cluster of a thousand": ({"grid": 1024, "cluster": 1024}, "cluster .* has 1024 CTAs, allowed are 16"),
    "negative shared bytes": ({"shared_bytes": -1}, "shared_bytes is -1"),
    "buffers in a list": ({"buffers": [X]}, "buffers is a list"),
    "buffer of a number": ({"buffers": {"x": 3}}, "buffer x"),
    "huge buffer": ({"buffers": {"x": {"dtype": "float64", "shape": [1 << 40]}}}, "the buffers take about"),
    "huge buffers together": (
        {"buffers": {str(i): {"dtype": "u1", "shape": [1 << 32]} for i in range(3)}},
        "take about",
    ),
    "negative shape": ({"buffers": {"x": {**X, "shape": [-1]}}}, "buffer x"),
    "shape of words": ({"buffers": {"x": {**X, "shape": ["a"]}}}, "buffer x"),
    "dtype of objects": ({"buffers": {"x": {**X, "dtype": "O"}}}, "make no array of numbers"),
    "fill of a word": ({"buffers": {"x": {**X, "fill": "zero"}}}, "cannot fill"),
    "random truth": ({"buffers": {"x": {"dtype": "bool", "shape": [2], "fill": "random"}}}, "cannot fill"),
    "seed of a word": ({"buffers": {"x": {**X, "fill": "random", "seed": "x"}}}, "cannot fill"),
    "fill out of range": ({"buffers": {"x": {"dtype": "uint8", "shape": [2], "fill": 300}}}, "cannot fill"),
    "a file that is not there": ({"buffers": {"x": {"load": "no.npy"}}}, "cannot load"),
    "arguments in an object": ({"args": {"x": 1}}, "args is a dict"),
    "an argument of null": ({"args": [None]}, "argument None"),
    "letters for hex": ({"args": [{"hex": "xyz"}]}, "argument"),
    "a float that is none": ({"args": [{"f32": "much"}]}, "argument"),
    "an integer too large": ({"args": [{"u32": 1 << 70}]}, "argument"),
    "a tensor map of a word": ({"args": [{"tensor_map": "x"}]}, "argument"),
    "a box of words": ({"buffers": {"x": X}, "args": [{"tensor_map": {"buffer": "x", "box": ["a"]}}]}, "argument"),
    "programmatic maybe": ({"programmatic": "maybe"}, "programmatic is 'maybe'"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_launch_description_that_cannot_be(name: str, tmp_path: Path) -> None:
    description, message = DESCRIPTIONS[name]
    (tmp_path / "k.ptx").write_text(HEAD + ".visible .entry k(.param .u64 a) { ret; }")
    (tmp_path / "launch.json").write_text(json.dumps(description))
    result = CliRunner().invoke(app, [str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "launch.json")])
    assert isinstance(result.exception, EmulatorError), result.exception
    with pytest.raises(EmulatorError, match=message):
        raise result.exception


def test_bytes_that_are_no_ptx_and_no_seeds(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_bytes(b"\x7fELF\xff\xfe")
    (tmp_path / "launch.json").write_text("{}")
    arguments = [str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "launch.json")]
    assert "is no text" in str(CliRunner().invoke(app, arguments).exception)
    refused = CliRunner().invoke(app, [*arguments, "--seeds", "0"])
    assert refused.exit_code == 2
    assert "--seeds" in refused.output
