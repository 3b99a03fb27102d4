"""Lists of unlike problems in one launch on Blackwell, the public competition's among them."""

from __future__ import annotations

import pytest
import torch

import padless
from padless.emulator.fake_driver import emulated_driver
from padless.formats import BlockScaledTensor
from padless.kernels.schedule import walk_of_list
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from support.ragged import GuardedOutput
from support.sm100_grouped import FORMATS, check_close, laid_out, make_case, values_of

C = Sm100GroupedConfig
BACKEND = "emulator:sm_100a"


def weights(t: BlockScaledTensor) -> BlockScaledTensor:
    """The one group of (1, N, K) weights as (N, K)."""
    return BlockScaledTensor(t.data[0], t.scale[0], t.format, t.global_scale, t.scale_layout)


def problems(fmt: str, sizes: list[tuple[int, int, int]], layout: str = "blocked", **options: object) -> list:
    return [
        make_case(fmt, (m,), n, k, exact=True, seed=i, layouts=(layout, layout), **options)
        for i, (m, n, k) in enumerate(sizes)
    ]


UNLIKE = [(70, 136, 96), (1, 8, 512), (0, 64, 64), (130, 40, 320), (33, 264, 160)]


@pytest.mark.parametrize(
    ("fmt", "config"),
    [
        ("MXFP8", C()),
        ("NVFP4", C(cta_group=2, mma_n=256)),
        ("MXFP4", C(tokens_on_n=True, mma_n=128, cta_group=2)),
        ("NVFP4", C(tokens_on_n=True, mma_n=64)),
    ],
    ids=["128x128", "pair 256x256", "pair 128 tokens", "64 tokens"],
)
def test_every_problem_has_its_own_sizes(fmt: str, config: Sm100GroupedConfig) -> None:
    cases = problems(fmt, UNLIKE)
    guarded = [GuardedOutput(m, n, torch.float32) for m, n, _ in UNLIKE]
    driver = emulated_driver("sm_100a")
    with driver.configured(seed=7, num_sms=4, arithmetic="fast"):
        padless.grouped_gemm_list(
            [c.a for c in cases], [weights(c.b) for c in cases], out=[g.out for g in guarded], backend=BACKEND,
            config=config,
        )  # fmt: skip
    for case, g in zip(cases, guarded, strict=True):
        g.check(case.valid)
        assert torch.equal(g.out.double(), case.exact)


TILES = {
    "128x128": C(),
    "128x256": C(mma_n=256),
    "pair 256x256": C(cta_group=2, mma_n=256),
    "64 tokens": C(tokens_on_n=True, mma_n=64),
    "pair 128 tokens": C(tokens_on_n=True, cta_group=2),
    "pair 256 tokens": C(tokens_on_n=True, mma_n=256, cta_group=2),
    "two pairs 256x256": C(cta_group=2, mma_n=256, multicast=2),
    "two pairs 128 tokens": C(tokens_on_n=True, cta_group=2, multicast=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tile", TILES)
def test_twenty_schedules(tile: str, seed: int) -> None:
    """Each on a list of its own, bit-accurate: one problem alone, forty small ones, empty ones and ones of one row."""
    config = TILES[tile]
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    count = (1, 40, 3, 5)[seed % 4]
    most = (300, 20, 200, 140)[seed % 4]
    sizes = [
        ((0, 1, number(1, most))[number(0, 3)], 8 * number(1, 6 if count == 40 else 40), 32 * number(1, 8))
        for _ in range(count - 1)
    ]
    sizes.append((number(most // 2, most), 8 * number(1, 80), 32 * number(1, 20)))
    cases = problems(("MXFP8", "NVFP4", "MXFP4")[seed % 3], sizes, ("blocked", "plain")[seed // 2 % 2])
    guarded = [GuardedOutput(m, n, torch.float32) for m, n, _ in sizes]
    driver = emulated_driver("sm_100a")
    with driver.configured(seed=seed, num_sms=config.cluster * (1 + seed % 2)):
        padless.grouped_gemm_list(
            [c.a for c in cases], [weights(c.b) for c in cases], out=[g.out for g in guarded], backend=BACKEND,
            config=config,
        )  # fmt: skip
    for case, fence in zip(cases, guarded, strict=True):
        fence.check(case.valid)
        assert torch.equal(fence.out.double(), case.exact)


@pytest.mark.parametrize("column_major", [False, True])
def test_plain_scales_alpha_and_both_majors(column_major: bool) -> None:
    cases = problems("NVFP4", [(20, 40, 96), (3, 72, 64)], "plain", global_scales=(torch.tensor([0.75]), None))
    alpha = torch.tensor([1.25, 3.0])
    outs = [
        torch.empty((n, m) if column_major else (m, n), dtype=torch.float16) for m, n, _ in ((20, 40, 0), (3, 72, 0))
    ]
    outs = [o.t() if column_major else o for o in outs]
    padless.grouped_gemm_list(
        [c.a for c in cases], [weights(c.b) for c in cases], out=outs, alpha=alpha, backend=BACKEND
    )
    for i, (case, out) in enumerate(zip(cases, outs, strict=True)):
        assert torch.equal(out, (case.exact.float() * (0.75 * alpha[i])).half())


def test_the_reference_gives_the_same() -> None:
    cases = problems("MXFP8", [(5, 16, 64), (9, 8, 96)])
    a, b = [c.a for c in cases], [weights(c.b) for c in cases]
    alpha = torch.tensor([2.0, 0.5])
    one = padless.grouped_gemm_list(a, b, alpha=alpha, out_dtype=torch.float32)
    two = padless.grouped_gemm_list(a, b, alpha=alpha, out_dtype=torch.float32, backend=BACKEND)
    for x, y in zip(one, two, strict=True):
        assert torch.equal(x, y)


# The four shapes of the GPU MODE NVFP4 grouped GEMM competition (2026): rows of every group; N and K are cut down here.
COMPETITION = {
    "deep K": ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
    "wide N": ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
    "middle": ((192, 320), 3072, 4096),
    "short K": ((128, 384), 4096, 1536),
}


def competition_problem(
    rows: int, n: int, k: int, g: torch.Generator
) -> tuple[BlockScaledTensor, BlockScaledTensor, torch.Tensor]:
    """As the competition draws them: bytes masked to 0, 0.5, 1, 1.5 and their negatives, scales 1 or 2, and scales of 1
    or 2 in the padding. Every sum is exact in float32 and fp16 rounds it once: the result has to be the same bits."""
    f = FORMATS["NVFP4"]
    codes, scales = [], []
    for count in (rows, n):
        drawn = torch.randint(0, 255, (count, k), dtype=torch.int64, generator=g) & 0xB
        codes.append(drawn.to(torch.uint8))
        scales.append((torch.randint(7, 9, (count, k // 16), generator=g) << 3).to(torch.uint8))
    a = laid_out(codes[0], scales[0], f, "blocked", None, None, trap=False)
    b = laid_out(codes[1], scales[1], f, "blocked", None, None, trap=False)
    return a, b, values_of(codes[0], scales[0], f) @ values_of(codes[1], scales[1], f).T


def check_competition(sizes: list[tuple[int, int, int]], config: Sm100GroupedConfig | None, **settings: object) -> None:
    """sizes: M, N and K of every problem."""
    g = torch.Generator().manual_seed(42)
    a, b, exact = zip(*(competition_problem(*size, g) for size in sizes), strict=True)
    # The columns contiguous and M padded to 16, as the fastest entries had it.
    outs = [torch.full((n, -(-m // 16) * 16), float("nan"), dtype=torch.float16)[:, :m].t() for m, n, _ in sizes]
    driver = emulated_driver("sm_100a")
    with driver.configured(num_sms=4, **settings):
        padless.grouped_gemm_list(a, b, out=outs, backend=BACKEND, config=config)
    for out, right in zip(outs, exact, strict=True):
        assert torch.equal(out, right.half())


@pytest.mark.parametrize("name", COMPETITION)
def test_the_competitions_shapes_are_exact(name: str) -> None:
    """Without the emulator's race checks, which the slow test below makes."""
    sizes = [(m, 256, 512) for m in COMPETITION[name][0]]
    check_competition(sizes, None, arithmetic="fast", checks=False)


EVERY_TILE: dict[str, Sm100GroupedConfig | None] = {"selected": None, **TILES}


@pytest.mark.slow
@pytest.mark.parametrize("tile", EVERY_TILE)
@pytest.mark.parametrize("name", COMPETITION)
def test_the_competitions_shapes_on_every_tile(name: str, tile: str) -> None:
    check_competition([(m, 384, 1024) for m in COMPETITION[name][0]], EVERY_TILE[tile])


# The ten problems by which the competition tells whether an entry is right: M, N and K of every group.
PUBLIC_TESTS = [
    ((96, 128), (128, 256), (128, 512)),
    ((256, 72), (512, 384), (256, 256)),
    ((128, 128), (128, 256), (128, 512)),
    ((80, 128, 256), (384, 256, 128), (256, 512, 128)),
    ((64, 72, 96), (128, 384, 512), (384, 512, 128)),
    ((64, 256, 128), (768, 128, 256), (512, 512, 128)),
    ((128, 128, 64), (256, 512, 512), (768, 128, 768)),
    ((128, 128, 128, 128), (128, 128, 128, 128), (128, 128, 128, 128)),
    ((40, 56, 384, 512), (512, 384, 256, 128), (256, 256, 256, 256)),
    ((512, 384, 256, 128), (256, 256, 256, 256), (512, 128, 512, 128)),
]


@pytest.mark.parametrize("number", range(10))
def test_the_competitions_public_tests_are_exact(number: int) -> None:
    """N and K cut down to 256; without race checks, which the slow test below makes."""
    sizes = [(m, min(n, 256), min(k, 256)) for m, n, k in zip(*PUBLIC_TESTS[number], strict=True)]
    check_competition(sizes, None, arithmetic="fast", checks=False)


@pytest.mark.slow
@pytest.mark.parametrize("tile", EVERY_TILE)
@pytest.mark.parametrize("number", range(10))
def test_the_competitions_public_tests_on_every_tile(number: int, tile: str) -> None:
    check_competition(list(zip(*PUBLIC_TESTS[number], strict=True)), EVERY_TILE[tile])


def test_walk_of_list() -> None:
    walk = walk_of_list([(70, 136, 96), (1, 8, 512), (0, 64, 64), (130, 40, 96), (33, 264, 96)], 128, 128)
    assert walk == [(1, 1), (3, 3), (0, 5), (4, 8), (2, 8)]


def test_what_is_refused() -> None:
    cases = problems("MXFP8", [(5, 16, 64), (9, 8, 96)])
    a, b = [c.a for c in cases], [weights(c.b) for c in cases]

    def refused(match: str, **changes: object) -> None:
        arguments = {"a": a, "b": b, "backend": BACKEND} | changes
        with pytest.raises(ValueError, match=match):
            padless.grouped_gemm_list(arguments.pop("a"), arguments.pop("b"), **arguments)

    refused("a has 2 problems, b 1", b=b[:1])
    refused("problem 1: a is .* K must be the same", b=[b[0], b[0]])
    refused("problem 0: out must be", out=[torch.empty(16, 5), torch.empty(9, 8)])
    refused("problem 1: out has strides", out=[torch.empty(5, 16), torch.empty(9, 9)[:, :8]])
    refused("problem 0: out has strides", out=[torch.empty(10, 32)[::2, ::2], torch.empty(9, 8)])
    refused("same formats", out=[torch.empty(5, 16), torch.empty(9, 8).half()])
    refused("alpha must be", alpha=torch.ones(3))
    refused("out_dtype is", out_dtype=torch.int8)
    refused("needs Blackwell", backend="emulator")
    four = problems("NVFP4", [(9, 8, 96)])[0]
    refused("same formats", a=[a[0], four.a], b=[b[0], weights(four.b)])
    mixed = [torch.empty(5, 16), torch.empty(8, 9).t()]
    refused("problem 1 has column_major", out=mixed)


def test_close_on_random_data() -> None:
    case = make_case("MXFP8", (50,), 24, 352, seed=3)
    (out,) = padless.grouped_gemm_list([case.a], [weights(case.b)], backend=BACKEND)
    check_close(case, out)
