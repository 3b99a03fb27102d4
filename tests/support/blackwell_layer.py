"""Runs a layer on a pretended B200, as a program of its own: `python -m support.blackwell_layer FORMAT TOKENS [BUG]`.

Every launch is the one of a real GPU: Triton's kernels and padless's own as PTX for sm_100a, by the driver's functions.
Prints one JSON object: whether the bits are the reference's, and of each launch its kernel, whether it is programmatic,
and the kinds of reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

FORMATS = {"FP8_BLOCK": None, "MXFP8": None, "NVFP4": None, "MXFP4": "MXFP8"}  # of weights, and of activations
EXPERTS, H, I, TOP_K = 5, 288, 192, 3  # noqa: E741
# What Triton does by itself and is harmless; see support.emulated_triton. Of padless's own kernels it is counted.
COMPILERS_OWN = ("race", "uninitialised-register")
WAIT = "griddepcontrol.wait;"


def without_wait(of: str) -> Callable[[Any], None]:
    """A bug: a kernel that reads what the launch ahead writes, and does not wait for it."""

    def plant(session: Any) -> None:
        loader, right = session.driver.loader, session.driver.loader.make

        def make(ptx: str, *arguments: Any) -> Any:
            if f".entry {of}" in ptx:
                assert WAIT in ptx
                ptx = ptx.replace(WAIT, "")
            return right(ptx, *arguments)

        loader.make = make

    return plant


def swiglu_changed(change: Callable[[Any], Any]) -> Any:
    """A bug between the two products: other scales than those that the first one stored."""
    from padless.moe import layer

    right = layer.swiglu
    return mock.patch.object(layer, "swiglu", lambda *arguments, **options: change(right(*arguments, **options)))


def gathered_changed(change: Callable[[Any], Any]) -> Any:
    """A bug between the gather and the first product."""
    from padless.moe import layer

    def gathered(*arguments: Any) -> Any:
        routing, rows = right(*arguments)
        return routing, change(rows)

    right = layer.gathered
    return mock.patch.object(layer, "gathered", gathered)


def weights_changed() -> Any:
    """A bug: each expert's tiles of scales are those of the expert before it."""
    from padless.moe import layer

    right = layer.Projection.product

    def product(self: Any, *arguments: Any) -> Any:
        return right(replace(self, weights=rolled(self.weights)), *arguments)

    return mock.patch.object(layer.Projection, "product", product)


def rolled(t: Any) -> Any:
    """Scales moved by one along their first axis: by a group for weights, by a row for rows."""
    moved = t.scale.clone()
    moved[1:] = t.scale[:-1]
    return replace(t, scale=moved)


BUGS: dict[str, Callable[[], Any]] = {
    "rows have their neighbours' scales": lambda: gathered_changed(rolled),
    "activated rows have their neighbours' scales": lambda: swiglu_changed(rolled),
    "scale tiles of the expert before": weights_changed,
}


def kinds_of_reports(launched: Any) -> list[str]:
    """What is wrong with a launch of the session."""
    harmless = () if launched.name.startswith("padless_") else COMPILERS_OWN
    return sorted({r.kind for r in launched.result.errors} - set(harmless))


def main(name: str, tokens: int, bug: str = "") -> dict[str, Any]:
    """The layer's record."""
    from padless.emulator.program.run import install

    session = install("B200", num_sms=2, seed=tokens, say=lambda line: None)
    if bug.startswith("no wait in "):
        without_wait(bug.removeprefix("no wait in "))(session)
    programmatic: list[bool] = []
    right = session.driver.launch

    def launch(*arguments: Any) -> int:
        programmatic.append(bool(arguments[-1]))
        return right(*arguments)

    session.driver.launch = launch

    import torch

    import padless
    from padless.layouts import to_blocked
    from padless.moe import moe

    fmt, activations = getattr(padless, name), FORMATS[name] and getattr(padless, FORMATS[name])
    draw = torch.Generator().manual_seed(tokens)
    sizes = ((2 * I, H), (H, I))
    w13, w2 = (
        padless.quantize(torch.randn(EXPERTS, n, k, generator=draw) / k**0.5, fmt, kind="weight") for n, k in sizes
    )
    if fmt.scale_dtype != torch.float32:  # in tiles, as a tensor core reads them
        w2 = replace(w2, scale=to_blocked(w2.scale), scale_layout="blocked")
    x, shared = (torch.randn(tokens, H, generator=draw).bfloat16() for _ in range(2))
    ids = torch.randint(-1, EXPERTS - 1, (tokens, TOP_K), generator=draw)  # -1: none; the last expert has no token
    weights = torch.rand(tokens, TOP_K, generator=draw)
    options = {"activations": activations}
    # On the CPU's twins, and the products in the emulator of single launches: bits of a tensor core, not of float64.
    want = moe(x, ids, weights, w13, w2, shared=shared, backend="emulator:sm_100a", **options)
    exact = moe(x, ids, weights, w13, w2, shared=shared, backend="reference", **options).float()
    on_gpu = [t.cuda() for t in (x, ids, weights, w13, w2)]
    with ExitStack() as planted:
        if bug in BUGS:
            planted.enter_context(BUGS[bug]())
        got = moe(*on_gpu, shared=shared.cuda(), **options).cpu()
    off = float((got.float() - exact).abs().max() / exact.abs().max()) if tokens else 0.0
    launches = [
        {"kernel": launched.name, "programmatic": is_early, "reports": kinds_of_reports(launched)}
        for launched, is_early in zip(session.launches, programmatic, strict=True)
    ]
    return {"equal": torch.equal(got, want), "off": off, "launches": launches, "refused": session.refused}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
