"""The layer's Triton kernels: equal to their twins in the interpreter, as machine code in the emulator, on a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from padless.moe import twins
from support import moe_cases, triton_cases
from support.interpreter import interpreted

triton = pytest.importorskip("triton")
from support.emulated_triton import EmulatedKernel  # noqa: E402


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Of every case in Triton's interpreter, from one process of its own."""
    return interpreted("moe_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", moe_cases.CASES)
def test_in_the_interpreter(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", moe_cases.CASES)
def test_on_the_gpu(name: str) -> None:
    moe_cases.CASES[name]("cuda")


# --- machine code for Hopper, in the emulator ------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernel]:
    """Every kernel of the layer replaced by its emulated machine code, with the hardware's casts."""
    from padless.moe.triton import combine, place_scales, quantize_rows, route
    from padless.quantization.triton import casts as triton_casts
    from padless.quantization.triton import fp8_block as quantize_triton
    from padless.quantization.triton import global_scale as quantize_triton_global
    from padless.quantization.triton import row_blocks as quantize_triton_rows

    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: True)
    kernels = []
    for module, name in (
        (route, "_route_few"),
        (route, "_rank"),
        (route, "_scan"),
        (route, "_place"),
        (quantize_rows, "_quantize_rows"),
        (combine, "_combine"),
        (combine, "_combine_backward"),
        (place_scales, "_place_scales"),
        (quantize_triton_global, "_factors_of_given"),
        (quantize_triton, "_fp8_block_activation"),
        (quantize_triton_rows, "_row_blocks"),
    ):
        kernels.append(EmulatedKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    # A GPU's arithmetic returns one NaN whatever went in, the emulator's keeps the sign of an operand.
    original = triton_cases.awkward
    monkeypatch.setattr(moe_cases, "awkward", lambda *a: _with_one_nan(original(*a)))
    return kernels


def _with_one_nan(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.isnan(), float("nan"))


def test_machine_code_of_route(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.moe.triton import route

    moe_cases.route_pair(moe_cases.draw_ids(9, 4, 5, 1), 5, "cpu")
    monkeypatch.setattr(route, "FEW_SLOTS", 64)
    monkeypatch.setattr(route, "SCANNED", 4)
    moe_cases.route_pair(moe_cases.draw_ids(110, 5, 7, 2), 7, "cpu")
    assert [k.launches for k in emulated[:4]] == [1, 1, 1, 1]
    # Counts of four tiles, of fifteen in four steps, and of three with 1024 bins.
    for tokens, experts in ((250, 200), (900, 7), (150, 600)):
        moe_cases.route_pair(moe_cases.draw_ids(tokens, 2, experts, experts), experts, "cpu")
    assert [k.launches for k in emulated[:4]] == [1, 4, 4, 4]


def test_ranks_do_not_reduce_across_lanes(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction of a warp for every slot would be most of the time that routing takes."""
    from padless.moe.triton import route

    monkeypatch.setattr(route, "FEW_SLOTS", 64)
    moe_cases.route_pair(moe_cases.draw_ids(65, 4, 7, 3), 7, "cpu")
    ptx = compiled_ptx(emulated[1])
    assert ptx.count("redux.sync") + ptx.count("shfl.sync") < 32


@pytest.mark.parametrize("name", moe_cases.FORMATS)
def test_machine_code_of_quantize_rows(name: str, emulated: list[EmulatedKernel]) -> None:
    """Gathered, scattered and activated rows of one format."""
    from padless import formats
    from padless.quantization.quantize import quantize

    x, fmt, rule = (moe_cases.awkward((7, 160), torch.bfloat16, 1), getattr(formats, name), moe_cases.rules(name)[0])
    given = moe_cases.given_scale(name)
    _, rows, inverse = twins.route(moe_cases.draw_ids(7, 3, 5, 2), 5)
    layout = moe_cases.layouts_of(name)[-1]
    want = quantize(x[rows.long()], fmt, scale_layout=layout, global_scale=given)
    moe_cases.assert_same(moe_cases.quantized(x, name, rule, layout, given=given, inverse=inverse), want)
    moe_cases.assert_same(moe_cases.gathered_by_kernel(x, name, rule, layout, rows, given), want)
    activation = moe_cases.activations()[moe_cases.FORMATS.index(name)]
    moe_cases.assert_activated(activation, torch.randn(3, 256) * 4, (name,), "cpu", torch.randn(3))
    assert emulated[4].launches == 2 + len(moe_cases.layouts_of(name))
    assert sum(k.launches for k in emulated[-2:]) == 1


def test_machine_code_of_routed_rows(emulated: list[EmulatedKernel]) -> None:
    moe_cases.routed_rows("cpu")


def test_machine_code_of_routed_rows_in_wide_tiles(
    emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What many tokens of wide rows are quantized in; few get more programs."""
    from padless.formats import FP8_BLOCK, BlockScaledTensor
    from padless.moe.triton import quantize_rows
    from padless.quantization.quantize import quantize

    sizes = ((64, 7168), (64, 2048), (64, 768), (40, 7168), (16, 7168), (1, 2048))
    widths = [quantize_rows.routed_tile(*size).columns for size in sizes]
    assert widths == [2048, 2048, 1024, 1024, 512, 512]
    for size, top_k in ((sizes[0], 3), (sizes[2], 8)):
        tile = quantize_rows.routed_tile(*size)
        monkeypatch.setattr(quantize_rows, "routed_tile", lambda *size, tile=tile: tile)
        x, ids = moe_cases.awkward((5, tile.columns + 160), torch.bfloat16, 3), moe_cases.draw_ids(5, top_k, 9, 4)
        rule = moe_cases.rules("FP8_BLOCK")[0]
        slots, data, scale = quantize_rows.route_quantize(
            x, ids, 9, FP8_BLOCK, scale_rule=rule, scale_layout="plain", factors=None
        )
        want = twins.route(ids, 9)
        assert all(torch.equal(one, other) for one, other in zip(slots, want, strict=True))
        moe_cases.assert_same(BlockScaledTensor(data, scale, FP8_BLOCK), quantize(x[want[1].long()], FP8_BLOCK))


def test_machine_code_of_placed_scales(emulated: list[EmulatedKernel]) -> None:
    """A launch behind the quantizing one, whose scales go to the tokens' rows: 4 bytes a row and block, in runs."""
    moe_cases.placed_scales("cpu")
    assert [k.launches for k in emulated[4:8:3]] == [2, 2]
    assert "st.global.b32" in compiled_ptx(emulated[7])


def test_scales_are_placed_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of scales, which the host knows: never where slots are sorted in the same launch."""
    from padless import FP8_BLOCK
    from padless.moe.triton import place_scales, quantize_rows

    asked = []
    monkeypatch.setattr(quantize_rows, "_quantize_rows", NoKernel())
    monkeypatch.setattr(place_scales, "_place_scales", NoKernel())
    monkeypatch.setattr(place_scales, "place", lambda placed, scale, **how: asked.append(scale.numel()))
    for tokens, top_k, k in ((1024, 8, 2048), (8192, 4, 1024), (4096, 8, 1024), (1 << 16, 1, 1024), (1 << 16, 2, 2048)):
        x = torch.empty((tokens, k), dtype=torch.bfloat16, device="meta")
        inverse = torch.empty((tokens, top_k), dtype=torch.int32, device="meta")
        quantize_rows.quantize_rows(x, FP8_BLOCK, inverse=inverse)
    assert asked == [1 << 18, 1 << 18]


def test_programmatic_launches_wait_first(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun before the kernel ahead has ended, they touch nothing until it has; the emulator reports what would."""
    _launch_programmatically(monkeypatch)
    programmatic = (*emulated[:5], emulated[7])
    assert [k.launches for k in programmatic] == [1, 1, 1, 1, 2, 1]
    for kernel in programmatic:
        ptx = compiled_ptx(kernel)
        # The product behind the scales may be large: it begins when they are there.
        releases = ptx.find("griddepcontrol.launch_dependents")
        assert (releases < 0) == (kernel is emulated[7])
        assert kernel is emulated[7] or ptx.index("griddepcontrol.wait") < releases


def test_rows_that_are_known_are_read_ahead(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that places scales reads `tokens`, and nothing else, before the quantizing one has ended.

    That one begins no other before it has itself waited for all that was launched ahead of it.
    """
    from support import emulated_triton

    allowed = (*emulated_triton.COMPILERS_OWN, "grid-dependency")
    monkeypatch.setattr(emulated_triton, "COMPILERS_OWN", allowed)
    x, want, inverse, rows = _placed_programmatically(monkeypatch)
    moe_cases.assert_same(moe_cases.quantized(x, "FP8_BLOCK", "", "plain", inverse=inverse, tokens=rows), want)
    quantizing, placing = compiled_ptx(emulated[4]), compiled_ptx(emulated[7])
    assert quantizing.index("griddepcontrol.wait") < quantizing.index("griddepcontrol.launch_dependents")
    assert global_accesses(quantizing.split("griddepcontrol.wait;")[0]) == []
    ahead, behind = placing.split("griddepcontrol.wait;")
    assert global_accesses(ahead) == ["ld.global.b32"]
    assert {access[:9] for access in global_accesses(behind)} == {"ld.global", "st.global"}


def test_rows_that_the_launch_ahead_writes_are_not_read_ahead(
    emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from padless.moe.triton import place_scales

    x, want, inverse, _ = _placed_programmatically(monkeypatch)
    moe_cases.assert_same(moe_cases.quantized(x, "FP8_BLOCK", "", "plain", inverse=inverse), want)
    place = place_scales.place
    monkeypatch.setattr(place_scales, "place", lambda placed, scale, are_known: place(placed, scale, are_known=True))
    with pytest.raises(AssertionError, match="grid-dependency"):
        moe_cases.quantized(x, "FP8_BLOCK", "", "plain", inverse=inverse)


def _placed_programmatically(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
    """(x, its gathered rows quantized, inverse, the token of each row), scales to be placed as on a Hopper GPU."""
    from padless import FP8_BLOCK
    from padless.moe.triton import quantize_rows
    from padless.quantization.quantize import quantize
    from padless.quantization.triton import launches

    monkeypatch.setattr(launches, "is_programmatic", lambda device: True)
    monkeypatch.setattr(quantize_rows, "PLACED_SCALES", 1)
    x = moe_cases.awkward((9, 416), torch.bfloat16, 1)
    _, rows, inverse = twins.route(moe_cases.draw_ids(9, 3, 5, 1), 5)
    return x, quantize(x[rows.long()], FP8_BLOCK), inverse, rows


def test_a_launch_that_does_not_wait_is_noticed(
    emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from padless.moe.triton import route
    from padless.quantization.triton import launches

    monkeypatch.setattr(route, "programmatic", lambda device: {"PROGRAMMATIC": 0, "launch_pdl": True})
    assert launches.programmatic(torch.device("cpu")) == {"PROGRAMMATIC": 0}
    with pytest.raises(AssertionError, match="grid-dependency"):
        _launch_programmatically(monkeypatch)


def _launch_programmatically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel ahead of the products, as on a Hopper GPU."""
    from padless import FP8_BLOCK
    from padless.moe.triton import quantize_rows, route
    from padless.quantization.quantize import quantize
    from padless.quantization.triton import launches

    monkeypatch.setattr(launches, "is_programmatic", lambda device: True)
    ids, x = moe_cases.draw_ids(9, 3, 5, 1), moe_cases.awkward((9, 160), torch.bfloat16, 1)
    moe_cases.route_pair(ids, 5, "cpu")
    _, rows, inverse = twins.route(ids, 5)
    want = quantize(x[rows.long()], FP8_BLOCK)
    moe_cases.assert_same(moe_cases.quantized(x, "FP8_BLOCK", "", "plain", inverse=inverse), want)
    monkeypatch.setattr(quantize_rows, "PLACED_SCALES", 1)
    moe_cases.assert_same(moe_cases.quantized(x, "FP8_BLOCK", "", "plain", inverse=inverse), want)
    monkeypatch.setattr(route, "FEW_SLOTS", 16)
    moe_cases.route_pair(ids, 5, "cpu")


class NoKernel:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


def test_machine_code_of_combine(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cases, "PROBLEMS", ((5, 3, 264),))
    moe_cases.combined("cpu")
    moe_cases.combine_gradients("cpu")
    assert all(k.launches for k in emulated[5:7])


def test_machine_code_of_wide_sums(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """What many tokens of wide rows are summed in; few get more programs."""
    from padless.moe.triton import combine

    sizes = ((1, 8), (64, 2048), (64, 2880), (64, 7168), (2048, 2048), (2048, 300))
    assert [combine.choose_width(*size) for size in sizes] == [128, 256, 512, 512, 1024, 512]
    for width, n in ((512, 520), (1024, 1032)):
        monkeypatch.setattr(combine, "choose_width", lambda *size, width=width: width)
        y, inverse, weights, _ = moe_cases.combine_problem(3, 3, n, torch.bfloat16, width)
        out = torch.full((3, n), float("nan"), dtype=torch.bfloat16)
        combine.combine(y, inverse, weights, None, out)
        moe_cases.same_values(out, twins.combine(y, inverse, weights, None, torch.bfloat16))


def test_machine_code_of_rows_that_there_are_not(emulated: list[EmulatedKernel]) -> None:
    moe_cases.sums_of_rows_that_there_are_not("cpu")
    moe_cases.judge_strayed("moe.gather_quantize", "cpu", "plain")
    moe_cases.scales_of_items_that_there_are_not("cpu")
    assert all(k.launches for k in emulated[4:8])


def compiled_ptx(kernel: Any) -> str:
    """All PTX that an emulated kernel was compiled to."""
    return "\n".join(c.asm["ptx"] for c in kernel._compiled.values())


def global_accesses(ptx: str) -> list[str]:
    """The instructions that touch global memory, in order."""
    return re.findall(r"\b(?:ld|st|atom|red)\.[\w.]*global[\w.:]*", ptx)


def e4m3_pairs_taken_apart(ptx: str) -> set[str]:
    """Registers of two e4m3 codes from one conversion of which a byte is taken by a shift."""
    pairs = re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)", ptx)
    return set(pairs) & set(re.findall(r"shr\.u16\s+%rs\d+, (%rs\d+), 8", ptx))


@pytest.mark.parametrize("tile", [(16, 256, 4), (8, 256, 2)])
def test_nvfp4_in_the_tiles_of_many_rows(
    tile: tuple[int, int, int], emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has scales of several blocks there, each converted into a register of its own.

    ptxas 12.8 miscompiles pairs of e4m3 codes that are taken apart and put together again: their scales and
    multipliers are then those of a register that nothing wrote. No emulator of PTX can see that.
    """
    from padless.moe.triton import quantize_rows

    monkeypatch.setattr(quantize_rows, "choose_tile", lambda *a, **k: quantize_rows.Tile(*tile))
    generator = torch.Generator().manual_seed(tile[0])
    x = torch.randn(tile[0] + 1, 2 * 360, generator=generator) * torch.logspace(-3, 2, 2 * 360)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    moe_cases.assert_activated(moe_cases.Activation(), x, ("NVFP4",), "cpu")
    kernel = emulated[4]
    assert kernel.launches
    for compiled in kernel._compiled.values():
        if "e4m3x2" in compiled.asm["ptx"]:
            assert not e4m3_pairs_taken_apart(compiled.asm["ptx"])
    assert any("e4m3x2" in compiled.asm["ptx"] for compiled in kernel._compiled.values())


@pytest.mark.parametrize(("name", "columns"), [("FP8_BLOCK", 7168), ("NVFP4", 2880), ("FP8_BLOCK", 1536)])
def test_gathered_rows_in_their_tile(
    name: str, columns: int, emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles of many gathered rows, with rows and columns left over, and rows of no expert."""
    from padless import formats
    from padless.moe.triton import quantize_rows
    from padless.quantization.quantize import quantize

    how = {"has_activation": False, "is_gathered": True}
    tile = quantize_rows.choose_tile(8192, columns, **how, is_placed=True)
    assert tile == ((8, 512, 4) if columns == 1536 else (4, 1024, 4))
    assert quantize_rows.choose_tile(8192, columns, **how) == (8, 512, 4)
    monkeypatch.setattr(quantize_rows, "choose_tile", lambda *a, **k: tile)
    x, given, rule = (
        moe_cases.awkward((11, tile.columns + 160), torch.bfloat16, 4),
        moe_cases.given_scale(name),
        moe_cases.rules(name)[0],
    )
    _, rows, inverse = twins.route(moe_cases.draw_ids(11, 3, 5, 6), 5)
    assert (inverse < 0).any()
    want = quantize(x[rows.long()], getattr(formats, name), global_scale=given)
    moe_cases.assert_same(moe_cases.quantized(x, name, rule, "plain", given=given, inverse=inverse), want)


def one_a_block() -> torch.Tensor:
    """Values from -4 to 4, each alone in its block of 128: a block's scale has all bits of its activation."""
    x = torch.zeros((40, 8, 128))
    x[:, :, 5] = torch.linspace(-4, 4, 320).view(40, 8)
    return x.flatten(1)


def test_every_bit_of_an_activation(emulated: list[EmulatedKernel]) -> None:
    for kind in ("silu", "gelu"):
        moe_cases.assert_activated(moe_cases.Activation(kind), one_a_block(), ("FP8_BLOCK",), "cpu")


def test_products_and_sums_stay_apart(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused multiply-add in what is defined as two operations, and 16-byte accesses where rows allow them."""
    monkeypatch.setattr(moe_cases, "PROBLEMS", ((3, 2, 512),))
    monkeypatch.setattr(moe_cases, "DTYPES", (torch.bfloat16,))
    moe_cases.combined("cpu")
    moe_cases.combine_gradients("cpu")
    for kernel in emulated[5:7]:
        ptx = compiled_ptx(kernel)
        assert "fma.rn.f32" not in ptx
        assert ".ftz" not in ptx
    assert "v4.b32" in compiled_ptx(emulated[5])


def test_a_fused_multiply_add_would_show(emulated: list[EmulatedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of bits fails when the compiler may contract, so it is no accident that it holds."""
    monkeypatch.setattr(moe_cases, "PROBLEMS", ((5, 3, 264),))
    monkeypatch.setattr(moe_cases, "DTYPES", (torch.float32,))
    compile_ = EmulatedKernel._compile

    def contracting(self: EmulatedKernel, runtime: Any, constants: Any, options: dict[str, int]) -> Any:
        return compile_(self, runtime, constants, options | {"enable_fp_fusion": True})

    monkeypatch.setattr(EmulatedKernel, "_compile", contracting)
    with pytest.raises(AssertionError, match="values differ"):
        moe_cases.combined("cpu")
    with pytest.raises(AssertionError, match="differ"):
        moe_cases.assert_activated(moe_cases.Activation("gelu"), one_a_block(), ("FP8_BLOCK",), "cpu")
    assert "fma.rn.f32" in compiled_ptx(emulated[5])
