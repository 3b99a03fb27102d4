"""FP8_BLOCK x FP8_BLOCK in the grouped Blackwell kernel: sums of 128 of K, scaled in registers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host import fit
from padless.runtime import jit
from support.emulator_variants import Edit, Variant
from support.machine_code import complaints
from support.sm100_grouped import Case, check_close, drawn_sizes, make_case, random_bytes, run

C = Sm100GroupedConfig
SLOW = pytest.mark.slow
BACKEND = "emulator:sm_100a"
CONFIGS = {
    "128x128": C(),
    "128x256": C(mma_n=256),
    "pair 256x128": C(cta_group=2),
    "pair 256x256": C(cta_group=2, mma_n=256),
    "64 tokens": C(tokens_on_n=True, mma_n=64),
    "pair 32 tokens": C(tokens_on_n=True, mma_n=32, cta_group=2),
    "pair 256 tokens": C(tokens_on_n=True, mma_n=256, cta_group=2),
    "two pairs 256x256": C(cta_group=2, mma_n=256, multicast=2),
    "four 128x128": C(multicast=4),
}


def problem(sizes: tuple[int, ...], n: int, k: int, **options: object) -> Case:
    return make_case("FP8_BLOCK", sizes, n, k, **options)


# (tile, sizes, rows past the end, N, K, scales of A, output); K ends inside a product, a stage, or with one.
RAGGED = [
    ("128x128", (70, 0, 129, 3), 2, 200, 336, "blocked", torch.bfloat16),
    ("pair 32 tokens", (5, 0, 33, 1), 4, 392, 272, "plain", torch.float32),
    ("pair 256x256", (1, 0, 127), 0, 264, 144, "plain", torch.float32),
    ("pair 256 tokens", (0, 130, 127), 1, 264, 256, "blocked", torch.float16),
    ("two pairs 256x256", (0, 257, 3), 2, 520, 400, "blocked", torch.bfloat16),
]


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=SLOW) for i in (1, 2, 3, 4))])
def test_ragged(number: int) -> None:
    tile, sizes, extra, n, k, scales, dtype = RAGGED[number]
    case = problem(sizes, n, k, m=sum(sizes) + extra, seed=number, layouts=(scales, "plain"))
    check_close(case, run(case, CONFIGS[tile], dtype, seed=number, num_sms=4).out)


@SLOW
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CONFIGS)
def test_twenty_schedules(name: str, seed: int) -> None:
    """Each on a ragged problem of its own, bit-accurate: data without roundings has equal bits, other data is close."""
    config = CONFIGS[name] if seed % 3 else C(**(vars(CONFIGS[name]) | {"num_stages": 2}))
    n = 8 * (1 + 7 * seed % 19) + config.cluster_n - config.tile_n
    exact, sizes = seed % 4 < 2, drawn_sizes(seed)
    case = problem(
        sizes, n, 16 * (5 + 11 * seed % 31), m=sum(sizes) + seed % 4, seed=seed, exact=exact,
        layouts=(("blocked", "plain")[seed % 2], "plain"),
    )  # fmt: skip
    out = run(case, config, torch.float32, seed=seed, num_sms=4 * (1 + seed % 2)).out
    check_close(case, out)
    if exact:
        assert torch.equal(out[: case.valid].double(), case.exact[: case.valid])


# ---- which bits


def folded(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """The documented sum: a fused multiply-add in float32 for every 128 of K, of their exact sums. 64-bit significands
    hold a fused sum of the test's numbers, so that it is rounded once."""
    a, b = (t.view(torch.float8_e4m3fn).double() for t in (codes, weight))
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for i in range(scales.shape[1]):
        part = slice(128 * i, 128 * (i + 1))
        products = (a[:, part] @ b[:, part].T).numpy().astype(np.longdouble)
        of_b = weight_scales[:, i].repeat_interleave(128)[: b.shape[0]]
        scale = (scales[:, i, None] * of_b[None]).numpy().astype(np.longdouble)
        total = (products * scale + total.astype(np.longdouble)).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize(
    "name", ["128x128", *(pytest.param(name, marks=SLOW) for name in ("pair 256x256", "64 tokens"))]
)
def test_the_bits_are_those_documented_and_hoppers(name: str) -> None:
    """Scales with all 24 bits and small integers, whose 128 products any tensor core adds exactly: all roundings are
    those of the promotion, which Hopper's kernel has too."""
    g = torch.Generator().manual_seed(7)
    (codes, _), (weight, _) = (random_bytes(FP8_BLOCK, shape, g, exact=True) for shape in ((70, 400), (1, 136, 400)))
    scales, weight_scales = torch.rand(70, 4, generator=g) + 0.5, torch.rand(1, 2, 4, generator=g) + 0.5
    a = BlockScaledTensor(codes.view(torch.float8_e4m3fn), scales, FP8_BLOCK)
    b = BlockScaledTensor(weight.view(torch.float8_e4m3fn), weight_scales, FP8_BLOCK)
    offs = torch.tensor([70], dtype=torch.int32)
    out = padless.grouped_gemm(a, b, offs, out_dtype=torch.float32, backend=BACKEND, config=CONFIGS[name])
    assert torch.equal(out, folded(codes, scales, weight[0], weight_scales[0]))
    assert torch.equal(out, padless.grouped_gemm(a, b, offs, out_dtype=torch.float32, backend="emulator"))


@SLOW
def test_a_row_has_the_same_bits_in_every_tile_and_call() -> None:
    case = problem((130, 3), 136, 272, seed=5, layouts=("plain", "plain"))
    out = run(case, CONFIGS["pair 256x128"]).out
    alone = BlockScaledTensor(case.a.data[129:130], case.a.scale[129:130].clone(), FP8_BLOCK)
    b = BlockScaledTensor(case.b.data[0], case.b.scale[0], FP8_BLOCK)
    for config in (None, CONFIGS["128x256"], CONFIGS["64 tokens"]):
        got = padless.gemm(alone, b, out_dtype=torch.float32, backend=BACKEND, config=config)
        assert torch.equal(got[0], out[129])
    (listed,) = padless.grouped_gemm_list([alone], [b], out_dtype=torch.float32, backend=BACKEND)
    assert torch.equal(listed[0], out[129])


def test_a_list_of_unlike_problems() -> None:
    cases = [problem((m,), n, k, exact=True, seed=i) for i, (m, n, k) in enumerate(((70, 136, 96), (1, 8, 400)))]
    weights = [BlockScaledTensor(c.b.data[0], c.b.scale[0], FP8_BLOCK) for c in cases]
    outs = padless.grouped_gemm_list([c.a for c in cases], weights, out_dtype=torch.float32, backend=BACKEND)
    for case, out in zip(cases, outs, strict=True):
        assert torch.equal(out.double(), case.exact)


def test_nan_scales_stay_in_their_rows_and_columns() -> None:
    case = problem((40, 9), 136, 272, exact=True, layouts=("plain", "plain"))
    case.a.scale[33, 1], case.b.scale[1, 1, 2] = float("nan"), float("nan")
    out = run(case, C(), guard=False).out
    hit = torch.zeros(49, 136, dtype=torch.bool)
    hit[33], hit[40:, 128:] = True, True
    assert torch.equal(out.isnan(), hit)
    assert torch.equal(out[~hit].double(), case.exact[~hit])


# ---- planted bugs

MAIN, LOAD, STORAGE, PROMOTE = (
    f"sm100_grouped/{name}" for name in ("sm100_grouped_gemm.cu", "load.cuh", "storage.cuh", "promote.cuh")
)
WAIT_DONE = "mbarrier_wait(done + at.stage * 8, at.phase);"
GIVE = "give_back_unit(read);"
WIDE = CONFIGS["pair 256x256"]
FEW = CONFIGS["64 tokens"]
# name: edit, kinds of report (none: wrong values), tile
BUGS: dict[str, tuple[Edit, tuple[str, ...], C]] = {
    "products not waited for": ((PROMOTE, WAIT_DONE, ""), ("race", "uninitialised-tensor-memory"), C()),
    "next unit not waited for": (
        (PROMOTE, "< k_blocks) await_next_unit();", "< k_blocks) ;"), ("race", "uninitialised-tensor-memory"), C(),
    ),
    "second unit not waited for": (
        (PROMOTE, "await_unit(accumulator); #pragma unroll for (int c = 0; c < UNIT_CHUNKS; ++c) load_chunk(c); }",
         "\n#pragma unroll\n for (int c = 0; c < UNIT_CHUNKS; ++c) load_chunk(c); }"),
        ("race", "uninitialised-tensor-memory"), WIDE,
    ),
    "no fence after done": (
        (PROMOTE, WAIT_DONE + " tcgen05_fence_after_thread_sync();", WAIT_DONE), ("missing-tcgen05-fence",), C(),
    ),
    "no fence after drained": (
        (PROMOTE, "tcgen05_fence_after_thread_sync(); #pragma unroll for (int step", "\n#pragma unroll\n for (int step"),
        ("missing-tcgen05-fence",), C(),
    ),
    "no fence before drained": (
        (PROMOTE, "tcgen05_fence_before_thread_sync(); __syncwarp(); if (lane", "__syncwarp(); if (lane"),
        ("missing-tcgen05-fence",), C(),
    ),
    "sums never given back": ((PROMOTE, GIVE, ""), ("deadlock",), C()),
    "sums given back while they are loaded": (
        (PROMOTE, "const int read = accumulator.stage; accumulator.advance();",
         "accumulator.advance(); const int read = accumulator.stage;"),
        ("race", "mbarrier", "deadlock"), C(),
    ),
    "the last block's sums given back before they are stored": (
        (PROMOTE, "if (!is_last) { give_back_unit(read);", "{ give_back_unit(read);"), ("race", "mbarrier"), C(),
    ),
    "an arrival of one warpgroup is enough": (
        (STORAGE, "NUM_STORE_WARPS * PROMOTERS; constexpr int QUEUE", "NUM_STORE_WARPS; constexpr int QUEUE"),
        ("race", "mbarrier"), C(),
    ),
    "drained not waited for": (
        (PROMOTE, "mbarrier_wait(drained, accumulator.phase ^ 1);", ";"), ("race", "mbarrier"), C(),
    ),
    "stage given back before the second unit": (
        (PROMOTE, "if (unit == UNITS - 1) commit_stage", "if (unit == 0) commit_stage"), ("race",), WIDE,
    ),
    "loads not waited for": ((PROMOTE, "tcgen05_wait_ld();", ""), ("register-in-flight",), C()),
    "sums not waited for": ((PROMOTE, "tcgen05_wait_st();", ""), ("race", "register-in-flight"), C()),
    "128 of K added to those before": ((PROMOTE, "SHAPE, step > 0", "SHAPE, kb + step > 0"), (), C()),
    "scales of the block before": (
        (PROMOTE, "now.load(promotion, kb);", "now.load(promotion, kb - (kb > 0));"), (), WIDE,
    ),
    "scales a block late": ((PROMOTE, "after.load(promotion, kb + 1);", "after.load(promotion, kb);"), (), C()),
    "weights' scales of the first 128 columns": (
        (PROMOTE, "now.weights[i / (OWN_CHUNKS / Promotion::WEIGHTS)]", "now.weights[0]"), (), WIDE,
    ),
    "tokens' scales in another order": ((PROMOTE, "[i * CHUNK + lane] =", "[i * CHUNK + (lane ^ 1)] ="), (), FEW),
    "tokens' scales not waited for": (
        (PROMOTE, "now.token[i] * now.weights[0]; __syncwarp();", "now.token[i] * now.weights[0];"), ("race",), FEW,
    ),
    "scales of rows past M": (
        (PROMOTE, "(wanted < operands.sfa.last_row ? wanted : operands.sfa.last_row)", "wanted"), ("out-of-bounds",),
        C(),
    ),
    "scales of columns past N": (
        (PROMOTE, "(row / 128 < blocks ? row / 128 : blocks - 1)", "(row / 128)"), ("out-of-bounds",), WIDE,
    ),
    "both warpgroups promote the same columns": (
        (PROMOTE, "(i % UNIT_CHUNKS * PROMOTERS + promoter) * CHUNK", "(i % UNIT_CHUNKS * PROMOTERS) * CHUNK"), (), C(),
    ),
    "a pair's rows of a unit one after the other": ((LOAD, "BY_UNITS ? ROWS / PIECES :", ""), (), WIDE),
    "second unit multiplies the first one's rows": ((PROMOTE, "unit * (UNIT_PART * BLOCK_K / 16)", "0"), (), WIDE),
}  # fmt: skip
QUICK_BUGS = ("128 of K added to those before",)


@pytest.mark.parametrize("name", [n if n in QUICK_BUGS else pytest.param(n, marks=SLOW) for n in [*BUGS, "none"]])
def test_a_planted_bug_is_found(name: str) -> None:
    edit, kinds, tile = BUGS.get(name, ((STORAGE, "#pragma once", "#pragma once"), (), WIDE))
    sizes = (20, 0, 66) if tile is FEW or name == "none" else (20, 0, 130)
    case = problem(sizes, 264 if tile is WIDE else 136, 400, exact=True)
    config = C(**(vars(tile) | {"num_stages": 2}))
    driver = Variant("sm_100a", MAIN, (edit,), fit(config, case.a, case.b, torch.empty(case.exact.shape)), 0)
    seen: set[str] = set()
    wrong = False
    for seed in range(3):
        got = run(case, config, seed=seed, arithmetic="fast", driver=driver, guard=False)
        seen |= {report.kind for report in got.result.reports}
        wrong |= not torch.equal(got.out.double(), case.exact)
        if (seen & set(kinds)) if kinds else wrong:
            break
    if name == "none":
        assert not seen
        assert not wrong
    else:
        assert (seen & set(kinds)) if kinds else wrong, (seen, wrong)


# ---- machine code


@SLOW
@pytest.mark.parametrize(("cta_group", "tokens_on_n"), list(itertools.product((1, 2), (False, True))))
def test_every_tile_compiles_without_spills(cta_group: int, tokens_on_n: bool) -> None:
    # A tile of 256 tokens, which is never chosen, spills some sums.
    for mma_n in (32, 64, 128) if tokens_on_n else (32, 64, 128, 256):
        config = C(
            cta_group=cta_group,
            tokens_on_n=tokens_on_n,
            mma_n=mma_n,
            kind="FP8_BLOCK",
            scales_a="plain",
            scales_b="plain",
        )
        assert complaints(jit.compile_kernel(MAIN, config.prelude(), "sm_100a")) == [], mma_n
