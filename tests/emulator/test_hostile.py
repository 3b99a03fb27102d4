"""PTX and launches that ask for more than there is: one sentence at once, and no memory or stack used up."""

from __future__ import annotations

from pathlib import Path

import pytest

from padless.emulator import Emulator, LaunchError, PtxSyntaxError
from padless.emulator.cli import read_description

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
